"""MTP: the layer that many targets ship for the token after the next one (DeepSeek-V3, section
2.2), applied recurrently.

Shapes: B batch, T tokens, D target width, V vocabulary, R supervised rows, P new positions, F
frontier nodes. Index t pairs the target's state at t, after its final norm, with the embedding of
token t + 1, and predicts token t + 2.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from spectrain.config.values import Share, Steps
from spectrain.drafters.layers.feature_layer import FeatureLayerDrafter, StepKeysValues
from spectrain.drafters.layers.llama_layer import num_heads
from spectrain.drafters.layers.losses import LossName
from spectrain.drafters.layers.target_layer import TargetLayer, make_cached_attention
from spectrain.drafters.layers.vocabulary import Supervision, embed_as_target
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.features.context_piece import UnrolledRows
from spectrain.models.architectures.mtp import MTP_HINT, has_mtp_layer, load_mtp_layer
from spectrain.models.cache_types import AttentionOptions
from spectrain.models.host_copies import select_joined
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.models.weight_block import BlockLinear

from .base import Losses, TrainingState
from .capabilities import ContextParallel, SavedFiles
from .layers.unrolled_attention import unrolled_attention


class Mtp(FeatureLayerDrafter):
    """One layer of the target's kind, with the target's embedding and head: h' = norm(layer(M
    [norm(E(x)); norm(h)])) (DeepSeek-V3, equations 21 to 23).

    All `num_steps` unrolled drafts share it (FastMTP, 2025, equation 3); step k weighs
    step_decay^k, normalised to sum to 1. As in engines, the first h is the target's state after its
    final norm, and each later h the layer's own output after its norm, in training and in decoding.
    A new layer has the target's final norm, and an M that passes on h.
    """

    # The drafter's file has all weights, so a saved drafter is loaded into a new layer.
    saved = SavedFiles(settings={"start": "new"})
    extra_widths = 4

    def __init__(
        self,
        target: Target,
        # Number of draft steps that are unrolled in training.
        num_steps: Steps = 3,
        # Divergence between the target's and the drafter's token distributions.
        loss: LossName = "forward_kl",
        # Factor from 0 to 1 between the loss weights of successive draft steps.
        step_decay: Share = 0.6,
        # Origin of the layer: the target's checkpoint (shipped), a new layer (new), or the
        # checkpoint's if it has one (auto).
        start: Literal["auto", "shipped", "new"] = "auto",
    ) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.divergence = loss
        self.step_decay = step_decay
        self.use_target_vocabulary(target)
        self.block = TargetLayer(target)
        self.enorm, self.hnorm = (copy.deepcopy(self.block.norm) for _ in range(2))
        self.fc = BlockLinear(2 * target.width, target.width, bias=False)
        self.capabilities = replace(
            self.capabilities,
            context_parallel=ContextParallel(num_steps, num_heads(self.block.decoder.config)),
        )
        self.saved = replace(
            self.saved,
            layout={
                name: ("model.safetensors", file_name) for name, file_name in self.names.items()
            },
        )
        has_data = target.device.type != "meta" and self.fc.weight.device.type != "meta"
        self.is_new_layer = start == "new" or (
            start == "auto" and not (has_data and has_mtp_layer(target.path))
        )
        self.starts_trained = not self.is_new_layer
        if not self.is_new_layer and has_data:
            self.load_shipped(target)

    def load_shipped(self, target: Target) -> None:
        """Load the layer of the target's checkpoint; raise `UserError` where its tensors differ
        from this layer's.
        """
        tensors = load_mtp_layer(target.path)
        own_tensors = self.state_dict()
        parts = {file_name: own_tensors[name] for name, file_name in self.names.items()}
        for name in sorted(parts.keys() ^ tensors.keys()):
            raise UserError(
                f"target {target.name}: its MTP layer {'lacks' if name in parts else 'has'} "
                f"{name}; {MTP_HINT}"
            )
        for name, tensor in parts.items():
            if tensor.shape != tensors[name].shape:
                shapes = f"{name} {list(tensors[name].shape)}, not {list(tensor.shape)}"
                raise UserError(f"target {target.name}: its MTP layer has {shapes}; {MTP_HINT}")
            tensor.copy_(tensors[name])

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Start a new layer with an M that passes on the state, and with the target's final
        norm.
        """
        if not self.is_new_layer:
            return
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[:, target.width :].fill_diagonal_(1.0)
            target_parameters = target.decoder.get_submodule(self.block.norm_name).parameters()
            for parameter, target_parameter in zip(
                self.block.norm.parameters(), target_parameters, strict=True
            ):
                parameter.copy_(
                    target_parameter.full_tensor()
                    if hasattr(target_parameter, "full_tensor")
                    else target_parameter
                )

    @property
    def names(self) -> dict[str, str]:
        """The name in files of every tensor, which does not depend on the names in the target's
        code.
        """
        decoder = f"block.decoder.{self.block.layers_name}.0."
        norm = f"block.decoder.{self.block.norm_name}."
        return {
            name: name.replace(decoder, "layer.").replace(norm, "norm.")
            for name in self.state_dict()
        }

    def inputs(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the layer's input [B, T, D] from tokens [B, T] and the states [B, T, D] before
        them.
        """
        return self.fc(
            torch.cat(
                [
                    self.enorm(embed_as_target(self, tokens)),
                    self.hnorm(hidden.to(self.fc.weight.dtype)),
                ],
                dim=-1,
            )
        )

    # Training

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Unroll the layer over its own output; gradients flow through all steps."""
        supervision = Supervision(self, batch)
        final = batch.input_features.at_layer("final")
        return self._judge_steps(supervision, self.unroll_steps(batch, final, supervision, state))

    def run_step(
        self, batch: Batch, hidden: Tensor, step: int, earlier_kv: list[StepKeysValues]
    ) -> tuple[Tensor, StepKeysValues]:
        """Run one draft step over states [B, T, D] after the keys and values of earlier steps;
        return its own too.
        """
        # Tokens that roll in from beyond the end of a document are never supervised.
        tokens = batch.piece.cut_columns(batch.tokens.roll(-1 - step, dims=1))
        positions = batch.piece.cut_columns(batch.positions + step)
        new_kv: list[StepKeysValues] = []

        def attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
            q, k, v = batch.piece.exchange_qkv(q, k, v, step)
            new_kv.append((k, v))
            keys, values = ([kv[part] for kv in (*earlier_kv, new_kv[0])] for part in (0, 1))
            return batch.piece.attend_unrolled(
                unrolled_attention, UnrolledRows(q, keys, values, batch.lengths, options)
            )

        return self.block(self.inputs(tokens, hidden), positions, attend), new_kv[0]

    def _judge_steps(self, supervision: Supervision, states: list[Tensor]) -> Losses:
        """Compute the losses of the states of every step's supervised indices together."""
        label_index, order, step = supervision.join_steps(len(states))
        hidden = select_joined(states, order)
        weight = self.step_decay**step / sum(
            self.step_decay**number for number in range(self.num_steps)
        )
        judged = supervision.judge_with_head(self.head.projection, hidden, label_index, weight)
        right = judged.predictions == supervision.labels[label_index]
        return Losses.by_depth({self.divergence: judged.loss}, right, step, self.num_steps)

    # Decoding

    def run(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        cache: TreeCache,
        visible: Tensor | None,
    ) -> Tensor:
        cache.set_positions(positions)
        assert cache.positions is not None
        attends = make_cached_attention(cache, visible, cache.positions)
        output: Tensor = self.block(self.inputs(tokens, hidden), positions, attends, cache)
        cache.add_uncommitted(tokens.shape[1])
        return output
