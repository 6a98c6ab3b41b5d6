"""Masks in a target that is trained with them. Shapes: B batch, T tokens, D target width."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from spectrain.config.values import NotNegative, Positive, Width
from spectrain.drafters.base import Losses, Stage, TrainingState
from spectrain.drafters.capabilities import Capabilities
from spectrain.drafters.layers.language_model_loss import language_model_loss
from spectrain.drafters.step_cost import BatchShape, Run, StepCost
from spectrain.features.batch import Batch
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.lora import TargetTraining
from spectrain.models.target import Target

from .gated_masks import GatedMasks


@dataclass(frozen=True)
class JointTraining:
    """How a target is trained together with its masks."""

    adapt: Literal["lora", "full"]
    # Rank and scale of the LoRA adapters.
    rank: Width
    alpha: Positive
    # Weight of the masks' loss relative to the target's own.
    masks_weight: NotNegative
    # Learning rate of the target as a multiple of trainer.lr.
    lr_scale: Positive


class MasksInTrainedTarget(GatedMasks):
    """Masks whose loss is added, with a weight, to the target's own on ordinary tokens; the target
    learns both. A subclass calls `train_with_target` before the constructor of its masks.
    """

    def train_with_target(self, joint: JointTraining) -> None:
        """Set how the target is trained; called before the constructor of the masks."""
        self.joint = joint
        self.target_training = TargetTraining(joint.adapt, joint.rank, joint.alpha)

    def make_capabilities(self) -> Capabilities:
        return replace(super().make_capabilities(), target_training=self.target_training)

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Start the masks, and open the target's weights or add its adapters."""
        super().prepare(target, token_counts)
        self.target_training.start_training(target)

    @property
    def stages(self) -> list[Stage]:
        adapted = {
            "params": self.target_training.parameters,
            "lr_scale": self.joint.lr_scale,
        }
        return [Stage([{"params": list(self.parameters())}, adapted], ())]

    @property
    def first_trained_layer(self) -> int:
        """Return 0: all layers learn, those below the masks too."""
        return 0

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
        terms = {name: self.joint.masks_weight * loss for name, loss in masks.terms.items()}
        return replace(masks, terms={"language_model": own_loss, **terms})
