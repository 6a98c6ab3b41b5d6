"""A layer that predicts the target's next feature, which EAGLE and MTP share.

Shapes: B batch, T tokens, D target width, V vocabulary, R supervised rows, F nodes.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from spectrain.drafters.base import TrainingState
from spectrain.drafters.capabilities import OutputLayerCost
from spectrain.drafters.context import Context
from spectrain.features.batch import Batch
from spectrain.models.features import Features, Layer
from spectrain.models.host_copies import select_rows
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft

from ..step_cost import BatchShape, Judged, Run, StepCost
from .state_rollout import StateDrafter, StateRollout
from .vocabulary import Supervision

StepKeysValues = tuple[Tensor, Tensor]  # of one draft step


class FeatureLayerDrafter(StateDrafter):
    """A recurrent layer from feature to feature, under the target's own embedding, head and
    vocabulary.
    """

    layers: tuple[Layer, ...] = ("final",)
    capabilities = replace(
        StateDrafter.capabilities,
        cost=OutputLayerCost,
        repeated_parts=("fc", "self_attn", "mlp", "block"),
    )
    # Number of draft steps that are unrolled in training.
    num_steps: int
    # Whether to stop gradients between successive draft steps.
    detach = False
    # Values that the backward pass stores per token and step besides the modules' own, in widths of
    # the target.
    extra_widths: int

    def use_target_vocabulary(self, target: Target) -> None:
        """Use the target's head and all of its tokens; nothing of them is saved."""
        self.head, rows = target.head, target.head.vocab_size
        self.register_buffer("d2t", torch.zeros(rows, dtype=torch.int64), persistent=False)
        self.register_buffer("t2d", torch.ones(rows, dtype=torch.bool), persistent=False)

    # Training

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of the layer, which runs once for each draft step over all tokens."""
        judged = Judged(self.num_steps * batch.supervised, target.head.vocab_size, batch.supervised)
        extra = self.extra_widths * target.width
        return StepCost(
            [Run(self, batch.tokens, batch.length, self.num_steps, extra=extra)], judged
        )

    @abstractmethod
    def run_step(
        self, batch: Batch, hidden: Tensor, step: int, earlier_kv: list[StepKeysValues]
    ) -> tuple[Tensor, StepKeysValues]:
        """Run one draft step over features [B, T, D] after the keys and values of earlier steps;
        return its own too.
        """

    def unroll_steps(
        self, batch: Batch, hidden: Tensor, supervision: Supervision, state: TrainingState
    ) -> list[Tensor]:
        """Unroll the layer over its own features, from the target's [B, T, D], with the true tokens
        as input.

        Return the features [R, D] of the supervised indices of every step. Step i at index t is
        supervised where token t + 2 + i is the assistant's, so the padded tail never is.
        """
        step_kv: list[StepKeysValues] = []
        states_by_step: list[Tensor] = []
        for step in range(max(1, min(self.num_steps, batch.max_document_length - 2))):
            inputs = hidden.detach() if self.detach else hidden
            hidden, new_kv = state.run_checkpointed(self.run_step, batch, inputs, step, step_kv[:])
            step_kv.append(new_kv)
            states_by_step.append(select_rows(hidden, supervision.is_supervised(step)))
        return states_by_step

    # Decoding

    def fuse_features(self, features: Features) -> Tensor:
        """Return the features [B, P, D] that the layer itself predicts."""
        return features.at_layer("final")

    def draft(self, context: Context) -> Draft:
        """Read the features of the last accepted tokens, and draft from the last of them."""
        root, cache = self.read_accepted(context)
        return Draft(StateRollout(self, cache, root))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(hidden.to(self.head.output.weight.dtype))
