"""Batches of drafts that were drawn after a root, whose tokens a policy weighs. Shapes: B batch,
T tokens, R supervised rows, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from spectrain.features.batch import PLAIN_ROWS, Batch, RowLoss
from spectrain.kernels.linear_divergence import Projection, linear_divergence
from spectrain.models.weight_block import apply_output_layer


@dataclass(frozen=True)
class WindowBatch(Batch):
    """A batch of windows, whose drawn tokens add -A log q to the loss (REINFORCE: the gradient of
    a drawn token's cross-entropy is the score function).
    """

    # [B, T] reward of a sampled token's draft beyond the expected reward; 0 at other tokens.
    advantage: Tensor = field(kw_only=True)
    # [B, T] weight of every token in the drafter's own loss; None weighs all tokens 1.
    weight: Tensor | None = None

    def row_loss(self, is_predicted: Tensor) -> RowLoss:
        """Return the weights of the rows, which have the drafter's own loss."""
        if self.weight is None:
            return PLAIN_ROWS
        return RowLoss(self.weight.roll(-1, dims=1)[is_predicted])

    def text_terms(
        self, states: Tensor, head: Projection, next_tokens: Tensor
    ) -> dict[str, Tensor]:
        """Return -sum A log q(d) of the drawn tokens, from the states before all tokens."""
        weight = self.advantage.roll(-1, dims=1)[self.next_is_supervised]
        return {"policy": linear_divergence(states, head, next_tokens, None, weight).loss}

    def draft_term(self, is_predicted: Tensor, draft_ids: Tensor) -> DrawnWindows:
        """Return the drawn tokens of the rows that `is_predicted` marks."""
        return DrawnWindows.from_batch(self, is_predicted, draft_ids)


@dataclass(frozen=True)
class DrawnWindows:
    """The drawn tokens of every row, which follow their root as the first supervised tokens
    after it.
    """

    name: ClassVar[str] = "policy"
    advantage: Tensor  # [R] of the token after the row's position
    offset: Tensor  # [R] tokens from the first one of the window to that token
    draft_ids: Tensor  # [R] its id in the draft vocabulary

    @classmethod
    def from_batch(
        cls, batch: WindowBatch, is_predicted: Tensor, draft_ids: Tensor
    ) -> DrawnWindows:
        """Read the windows at the positions that `is_predicted` [B, T] marks."""
        mask = batch.loss_mask
        index = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        begins = mask & ~mask.roll(1, dims=1)
        starts = torch.where(begins, index, 0).cummax(dim=1).values
        advantage, offset, tokens = (
            part.roll(-1, dims=1)[is_predicted]
            for part in (batch.advantage, index - starts, batch.tokens)
        )
        return cls(
            advantage, offset, torch.searchsorted(draft_ids, tokens).clamp(max=len(draft_ids) - 1)
        )

    def loss(
        self, hidden: Tensor, lm_head: nn.Linear, label_index: Tensor, step: Tensor | int
    ) -> Tensor:
        """Return -sum A log q(d) of drawn tokens d, from states [R, D] of rows `label_index` at a
        draft step.

        A path that begins at the root predicts token `offset` of the window in step `offset`; other
        pairs drafted nothing.
        """
        weight = self.advantage[label_index] * (self.offset[label_index] == step)
        counted = weight.nonzero()[:, 0]
        drawn = self.draft_ids[label_index[counted]]
        return apply_output_layer(
            lm_head,
            hidden[counted],
            lambda head, states: linear_divergence(states, head, drawn, None, weight[counted]).loss,
        )
