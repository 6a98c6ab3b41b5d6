"""EAGLE-3 (Li et al., 2025): decoder layers, usually one, that draft from their own hidden states.

Shapes: B batch, T tokens, D target width, V draft vocabulary, R supervised rows, P new positions, F
frontier nodes. Index t pairs the target's features at t with the embedding of token t + 1, and
predicts token t + 2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from spectrain.config.values import Count, LayerCount, Share, Steps, VocabularySize, Width
from spectrain.drafters.layers.eagle_layers import NORM_VARIANTS, EagleSettings
from spectrain.drafters.layers.eagle_unrolled import UnrolledEagle
from spectrain.drafters.layers.fitted_start import count_fit, fit_eagle, measure_fit
from spectrain.drafters.layers.kernel_steps import draft_by_kernels
from spectrain.drafters.layers.losses import LossName
from spectrain.drafters.layers.state_rollout import StateRollout
from spectrain.drafters.layers.target_kind import KIND_VARIANTS, check_architecture
from spectrain.drafters.layers.vocabulary import Supervision
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.models.accelerator import accelerator
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft

from .base import Losses, TrainingState
from .capabilities import (
    ContextParallel,
    InitialFit,
    SavedFiles,
)
from .context import Context

VARIANTS = (*NORM_VARIANTS, *KIND_VARIANTS, "norm_output", "own_embedding")


class Eagle3(UnrolledEagle):
    """EAGLE-3 with training-time test (section 3.2): `ttt_steps` unrolled drafts share one backward
    pass.

    Three layers of the target are fused into the first hidden state; each later draft step reads
    the un-normed output of the step before it. The drafter has its own head, over the `vocab_size`
    tokens that the assistant uses most. The first of its `num_layers` reads the embedding and the
    hidden state, each later one the output of the layer before it.

    `architecture` holds differences from the target's layer: keys of a Llama configuration, or
    variants that other projects train, which are false by default. norm_before_residual: the normed
    state is the residual stream too; norm_before_fc: one norm over the fused features; fc_norm: one
    norm for each layer's features; qk_norm: queries and keys are normed per head, as in Qwen3;
    norm_output: the next step reads the normed output (EAGLE-3.1); own_embedding: the drafter has
    its own input embedding, which is not trained. Two are parts of the target's kind, with its
    sizes: latent_attention, as in DeepSeek's models, and experts, its feed-forward block; with
    these, start=fitted is start=target.
    """

    saved = SavedFiles(
        shape=("vocab_size", "layers", "num_layers", "window", "head_rank", "architecture")
    )

    def __init__(
        self,
        target: Target,
        # Number of draft steps that are unrolled in training (training-time test).
        ttt_steps: Steps = 7,
        # Draft vocabulary in tokens; larger values are capped at the target's vocabulary.
        vocab_size: VocabularySize = 32000,
        # Layers of the target whose hidden states are fused; null uses the family's default layers.
        layers: list[int] | None = None,
        # Number of decoder layers of the drafter.
        num_layers: LayerCount = 1,
        # Number of preceding positions that a token attends to; null attends to all of them.
        window: Count | None = None,
        # Divergence between the target's and the drafter's token distributions.
        loss: LossName = "forward_kl",
        # Factor from 0 to 1 between the loss weights of successive draft steps.
        step_decay: Share = 0.8,
        # Initial values: the target's output layer, and the layers fitted to its states by least
        # squares (fitted) or fc that passes on a layer and heads that attend to their own position
        # (target); or random ones (random).
        start: Literal["target", "random", "fitted"] = "target",
        # Number of tokens, of the first batches of the training, that start=fitted reads.
        fit_tokens: Count = 65536,
        # Rank of the factorised output layer (SlimSpec); null uses a full-rank layer.
        head_rank: Width | None = None,
        # Whether the output layer keeps the target's weights and is not trained.
        freeze_output: bool = False,
        # Configuration keys and variants of the layers that differ from the target's; null copies
        # the target's.
        architecture: dict[str, Any] | None = None,
    ) -> None:
        complete = check_architecture(architecture or {}, VARIANTS)
        own = complete["own_embedding"]
        super().__init__(
            target,
            EagleSettings(num_layers, layers, vocab_size, window, start, own, head_rank, complete),
        )
        self.num_steps = ttt_steps
        self.divergence = loss
        self.step_decay = step_decay
        self.norm_output = complete["norm_output"]
        fit = None
        if start == "fitted" and fit_tokens and not any(complete[key] for key in KIND_VARIANTS):
            fit = InitialFit(fit_tokens, fit_eagle, measure_fit, count_fit)
        self.capabilities = replace(
            self.capabilities,
            initial_fit=fit,
            prepare_kernels=warm_up_steps,
            context_parallel=ContextParallel(ttt_steps, self.self_attn.num_heads),
        )
        if freeze_output and start == "random":
            raise UserError(
                "drafter.freeze_output=true: a random output layer must learn; use "
                "drafter.start=target or fitted, or drafter.freeze_output=false"
            )
        frozen = (
            [self.embed_tokens, self.lm_down, self.lm_head]
            if freeze_output
            else [self.embed_tokens]
        )
        for module in filter(None, frozen):
            module.requires_grad_(False)

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Choose the draft vocabulary and initialise the layers, with heads that attend to their
        own position.
        """
        super().prepare(target, token_counts)
        if self.start != "random":
            self.self_attn.init_self()

    # Training

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Unroll the drafter over its own hidden states, with the true tokens as input; gradients
        flow through it all.

        Step i at index t is supervised where token t + 2 + i is the assistant's, so the padded tail
        never is. The sum of the steps is weighted by step_decay^i.
        """
        supervision = Supervision(self, batch)
        count = max(1, min(self.num_steps, batch.max_document_length - 2))
        return self.judge_steps(
            supervision, self.supervised_states(supervision, batch, count, state)
        )

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Read the features of the last accepted tokens, and draft from the last of them."""
        # A class derived from this one may compute something else in a step.
        by_kernels = draft_by_kernels(self, context) if type(self) is Eagle3 else None
        if by_kernels is not None:
            return Draft(by_kernels)
        root, cache = self.read_accepted(context)
        steps = accelerator().drafter_steps(self)
        rollout = None
        if steps is not None:
            rollout = steps.start_rollout(cache, root, context.builder.max_drafted)
        return Draft(rollout or StateRollout(self, cache, root, self.draft_ids))


@torch.inference_mode()
def warm_up_steps(drafter: Eagle3) -> None:
    """Run once what an accelerator computes in place of a drafter's modules."""
    steps = accelerator().drafter_steps(drafter)
    if steps is not None:
        steps.warm_up()
