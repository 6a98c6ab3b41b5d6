"""SPACE (Yi et al., 2024, arXiv 2402.11809): the target learns to decode in parallel, and verifies
its own masks.

Shapes: B batch, T tokens, K masks, D target width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from spectrain.config.values import NotNegative, Positive, Seed, Share, Steps, Width
from spectrain.drafters.base import Losses, Stage, TrainingState
from spectrain.drafters.capabilities import Capabilities, SavedFiles
from spectrain.drafters.layers.language_model_loss import language_model_loss
from spectrain.drafters.step_cost import BatchShape, Run, StepCost
from spectrain.features.batch import Batch
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.lora import TargetTraining
from spectrain.models.target import Target
from spectrain_research.shared.gated_masks import MaskConfig
from spectrain_research.shared.learned_masks import LearnedMasks


class Space(LearnedMasks):
    """Mask tokens in the target, which is fine-tuned to fill them (semi-autoregressive
    fine-tuning), and no other drafter.

    The loss is the language model's own, on ordinary tokens, + `masks_weight` times the
    cross-entropy of the masks behind random prefixes. A round verifies the drafted tokens and runs
    new masks behind each of them in one forward (auto-correct decoding). The output is that of the
    fine-tuned target, token by token: only drafts come from masks.
    """

    saved = SavedFiles(shape=("num_masks",))

    def __init__(
        self,
        target: Target,
        # Number of mask tokens behind a prefix, which is the number of drafts.
        num_masks: Steps = 4,
        # How the target is trained: LoRA adapters in all its linears (lora), or all weights (full).
        adapt: Literal["lora", "full"] = "lora",
        # Rank of the LoRA adapters, used with adapt=lora.
        adapter_rank: Width = 16,
        # Scale of the LoRA adapters; their output is multiplied by alpha / rank.
        adapter_alpha: Positive = 32.0,
        # Weight of the masks' loss relative to the target's own.
        masks_weight: NotNegative = 1.0,
        # Learning rate of the target as a multiple of trainer.lr.
        target_lr_scale: Positive = 0.25,
        # Factor from 0 to 1 between the loss weights of successive masks.
        step_decay: Share = 0.9,
        # Number of mask tokens per ordinary token in a training batch.
        mask_ratio: Positive = 1.0,
        # Seed of the prefixes that masks follow in training.
        seed: Seed = 0,
    ) -> None:
        self.target_training = TargetTraining(adapt, adapter_rank, adapter_alpha)
        super().__init__(
            target,
            MaskConfig(
                num_masks=num_masks,
                rank=0,
                sampler=False,
                strategy="quadratic",
                loss="cross_entropy",
                consistency=0.0,
                step_decay=step_decay,
                mask_ratio=mask_ratio,
                seed=seed,
            ),
        )
        self.masks_weight, self.target_lr_scale = masks_weight, target_lr_scale

    def make_capabilities(self) -> Capabilities:
        return replace(super().make_capabilities(), target_training=self.target_training)

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Start the masks near the mean embedding, and open the target's weights or add its
        adapters.
        """
        super().prepare(target, token_counts)
        self.target_training.start_training(target)

    @property
    def stages(self) -> list[Stage]:
        adapted = {"params": self.target_training.parameters, "lr_scale": self.target_lr_scale}
        return [Stage([{"params": list(self.parameters())}, adapted], ())]

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of the target over tokens and masks, and once more over the tokens
        alone.
        """
        cost = super().step_cost(target, batch)
        return replace(cost, runs=[*cost.runs, Run(target.layers, batch.tokens, batch.length)])

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        masks = super().loss(batch, target, state)
        plan = ForwardPlan(
            layers=("final",),
            grad=torch.is_grad_enabled(),
            recompute=state.recompute,
            lengths=batch.lengths,
        )
        final = target.run(batch.tokens, plan).at_layer("final")[batch.next_is_supervised]
        own_loss = language_model_loss(final, batch, target, self.target_training, False)
        terms = {name: self.masks_weight * loss for name, loss in masks.terms.items()}
        return replace(masks, terms={"language_model": own_loss, **terms})
