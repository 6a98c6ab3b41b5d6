"""EAGLE (Li et al., 2024): a decoder layer that predicts the target's next feature; and HASS, which
trains it as it decodes.

Shapes: B batch, T tokens, D target width, V vocabulary, R supervised rows, P new positions, F
frontier nodes. Index t pairs the target's feature at t, after its final norm, with the embedding of
token t + 1, and predicts the feature at t + 1, from which the target's head computes token t + 2.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.config.values import NotNegative, Seed, Share, Steps
from spectrain.drafters.layers.feature_layer import FeatureLayerDrafter, StepKeysValues
from spectrain.drafters.layers.llama_layer import Attention, Mlp, Rotary, llama_config
from spectrain.drafters.layers.losses import LossName, top_k_loss
from spectrain.drafters.layers.target_kind import check_architecture
from spectrain.drafters.layers.vocabulary import Supervision
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import linear_divergence
from spectrain.models.host_copies import on_host, select_joined, select_rows
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.models.weight_block import BlockLinear
from spectrain.randomness import FEATURE_NOISE, sequence_generator

from .base import Losses, TrainingState
from .capabilities import SavedFiles
from .layers.unrolled_attention import unrolled_attention

NOISE_LENGTH = 512  # tokens of a text whose noise has the width of the setting


class Eagle1(FeatureLayerDrafter):
    """One layer f' = layer(fc [E(x); f]) without norms before and after it, under the target's
    frozen embedding and head (sections 3.1 and 4.1).

    The loss of a supervised index is summed over the steps i, weighted by step_decay^i:

        regression_weight SmoothL1(f', f)  +  token_weight D(p, q)  -  top_k_weight sum of p log q
        over the 10 likeliest by p

    The head computes p from f and q from f'. EAGLE-1 is one step without the last term; EAGLE-2
    decodes it with another tree. HASS (Zhang et al., 2024) is several steps: each one reads the
    output of the step before it and attends to the keys that decoding has (harmonized context
    alignment), and `detach` stops gradients between steps. EAGLE-3's training-time test is the same
    alignment without regression and without `detach`.
    """

    saved = SavedFiles(shape=("bias", "architecture"))
    extra_widths = 3

    def __init__(
        self,
        target: Target,
        # Number of draft steps that are unrolled in training.
        num_steps: Steps = 1,
        # Divergence between the token distributions that the target's head computes from the two
        # features.
        loss: LossName = "forward_kl",
        # Weight of the smooth L1 distance to the target's next feature.
        regression_weight: NotNegative = 1.0,
        # Weight of the divergence between the two token distributions.
        token_weight: NotNegative = 0.1,
        # Weight of the cross-entropy over the target's ten most likely tokens.
        top_k_weight: NotNegative = 0.0,
        # Factor from 0 to 1 between the loss weights of successive draft steps.
        step_decay: Share = 1.0,
        # Whether to stop gradients between successive draft steps.
        detach: bool = True,
        # Width of the uniform noise added to the input features of a text of 512 tokens; longer
        # texts get proportionally less.
        noise: NotNegative = 0.2,
        # Initial value of fc: pass the target's feature through (target), or random (random).
        start: Literal["target", "random"] = "target",
        # Whether fc has a bias; EAGLE and SGLang have one, vLLM has none.
        bias: bool = False,
        # Configuration keys of the layer that differ from the target's; null copies the target's.
        architecture: dict[str, Any] | None = None,
        # Seed of the feature noise.
        seed: Seed = 0,
    ) -> None:
        super().__init__()
        if not regression_weight and not token_weight and not top_k_weight:
            raise UserError(
                f"drafter.token_weight={token_weight}: all terms of the loss have weight 0; set "
                "one weight above 0"
            )
        if top_k_weight and loss == "cross_entropy":
            raise UserError(
                "drafter.top_k_weight: a cross-entropy does not use the target's distribution; "
                "use drafter.loss=forward_kl"
            )
        config = llama_config(target, check_architecture(architecture or {}, ()))
        self.num_steps = num_steps
        self.divergence = loss
        self.step_decay = step_decay
        self.detach = detach
        self.regression_weight = regression_weight
        self.token_weight = token_weight
        self.top_k_weight = top_k_weight
        self.noise, self.start, self.seed = noise, start, seed
        self.use_target_vocabulary(target)
        self.fc = BlockLinear(2 * target.width, target.width, bias=bias)
        self.self_attn = Attention(config, target.width)
        self.post_attention_layernorm = nn.RMSNorm(target.width, eps=config.rms_norm_eps)
        self.mlp = Mlp(config)
        self.rotary = Rotary(config)

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Start fc to pass on the feature, so that the first logits are near the target's;
        start=random keeps it random.
        """
        if self.start == "target":
            with torch.no_grad():
                self.fc.weight.zero_()
                self.fc.weight[:, target.width :].fill_diagonal_(1.0)

    def inputs(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the layer's input [B, T, D] from tokens [B, T] and the features [B, T, D]
        before them.
        """
        with torch.no_grad():
            embedded = self.head.embed(tokens).to(self.fc.weight.dtype)
        return self.fc(torch.cat([embedded, hidden.to(self.fc.weight.dtype)], dim=-1))

    def outputs(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the predicted features [B, T, D]."""
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))

    # Training

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Unroll the layer from the target's features with noise; return the losses of all
        steps.
        """
        assert batch.features is not None
        supervision = Supervision(self, batch)
        final = batch.features.at_layer("final")
        states_by_step = self.unroll_steps(
            batch, self._with_noise(batch, final, state.step), supervision, state
        )
        return self._judge_steps(supervision, final, states_by_step)

    def run_step(
        self, batch: Batch, hidden: Tensor, step: int, earlier_kv: list[StepKeysValues]
    ) -> tuple[Tensor, StepKeysValues]:
        """Run one draft step over features [B, T, D] after the keys and values of earlier steps;
        return its own too.
        """
        # Tokens that roll in from beyond the end of a document are never supervised.
        tokens = batch.tokens.roll(-1 - step, dims=1)
        x = self.inputs(tokens, hidden)
        q, k, v = self.self_attn.project_qkv(x, self.rotary(x, batch.positions + step))
        keys, values = ([kv[part] for kv in (*earlier_kv, (k, v))] for part in (0, 1))
        attended = self.self_attn.project_output(unrolled_attention(q, keys, values, batch.lengths))
        return self.outputs(x, attended), (k, v)

    def _with_noise(self, batch: Batch, final: Tensor, step: int) -> Tensor:
        """Add uniform noise from `noise` [-1/2, 1/2] 512 / length to features [B, T, D], so that
        the layer learns to read inexact features. The tokens of a conversation and the step seed
        its noise.
        """
        if not self.noise:
            return final
        noises = []
        for tokens, _ in batch.split_documents():
            source = sequence_generator(FEATURE_NOISE, self.seed, tokens, step)
            length = int(tokens.nonzero()[-1]) + 1 if tokens.any() else 1  # without the padding
            noise = torch.rand(length, final.shape[-1], generator=source) - 0.5
            noises.append(
                F.pad(noise * self.noise * NOISE_LENGTH / length, (0, 0, 0, len(tokens) - length))
            )
        return final + torch.cat(noises).view(final.shape).to(final)

    def _judge_steps(
        self, supervision: Supervision, final: Tensor, states_by_step: list[Tensor]
    ) -> Losses:
        """Compute the losses of the features of every step's supervised indices together."""
        label_index, order, step = supervision.join_steps(len(states_by_step))
        hidden = select_joined(states_by_step, order)
        weight = self.step_decay**step
        labels = select_rows(final, on_host(supervision.row_index) >= 0)
        features = labels.to(hidden.dtype)[label_index]
        distance = F.smooth_l1_loss(hidden, features, reduction="none").mean(-1)
        judged = supervision.judge_with_head(
            self.head.projection, hidden, label_index, self.token_weight * weight
        )
        terms = {
            "regression": self.regression_weight * (weight * distance).sum(),
            self.divergence: judged.loss,
        }
        if self.top_k_weight and supervision.target_log_probs is not None:
            target_log_probs = supervision.target_log_probs.select_rows(label_index)
            top_k = linear_divergence(
                hidden,
                self.head.projection,
                target_log_probs,
                top_k_loss,
                self.top_k_weight * weight,
            )
            terms["top_k"] = top_k.loss
        return Losses.by_depth(
            terms, judged.predictions == supervision.labels[label_index], step, self.num_steps
        )

    # Decoding

    def run(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        cache: TreeCache,
        visible: Tensor | None,
    ) -> Tensor:
        x = self.inputs(tokens, hidden)
        projected = self.self_attn.project_qkv(x, self.rotary(x, positions))
        output = self.outputs(x, self.self_attn.attend_cached(*projected, cache, visible))
        cache.add_uncommitted(tokens.shape[1])
        return output
