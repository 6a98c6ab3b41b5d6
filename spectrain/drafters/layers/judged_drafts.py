"""The supervised drafts of blocks after anchors.

Shapes: A anchors, S slots of a block, K drafts of it, W width, R supervised drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.drafters.base import Losses
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import DivergenceResult, Projection
from spectrain.models.host_copies import copy_to_device, on_host

from .anchors import Anchors
from .vocabulary import Supervision


@dataclass(frozen=True)
class SlotStates:
    """The normed states of the slots of blocks, in training and in decoding."""

    all_states: Tensor  # [A, S, W]
    first_draft_slot: int

    @property
    def draft_states(self) -> Tensor:
        """The states [A, K, W] of the slots that draft."""
        return self.all_states[:, self.first_draft_slot :]


class JudgedDrafts:
    """The supervised drafts of a batch, flat and ordered by their labels' rows, as a block
    drafter's loss reads them.

    Draft d of the anchor at p has the target's distribution at p + d as its label, as far as the
    tokens before it carry loss without a gap.
    """

    def __init__(
        self,
        supervision: Supervision,
        batch: Batch,
        anchors: Anchors,
        slots: SlotStates,
        progress: float = 0.0,
    ) -> None:
        self.supervision = supervision
        self.batch = batch
        self.anchors = anchors
        self.slots = slots
        self.progress = progress  # share of the training that is done
        self.states = slots.draft_states
        self.piece = batch.piece
        states = self.states  # [A, K, W]
        self.num_drafts = states.shape[1]
        device = states.device
        # Drafts are chosen on the host.
        rows = on_host(supervision.row_index).flatten()
        depths = torch.arange(self.num_drafts, device="cpu")
        positions = on_host(anchors.token_indices)[:, None] + depths
        label_index = torch.where(
            positions < len(rows), rows[positions.clamp(max=len(rows) - 1)], -1
        )
        is_judged = (label_index >= 0).long().cumprod(1).bool()  # [A, K]
        label_index, order = label_index[is_judged].sort(stable=True)  # [R]
        judged = is_judged.flatten().nonzero()[:, 0][order]
        # [A, K] of the positions whose next token is drafted
        self.token_indices = copy_to_device(positions, device)
        self.is_judged = copy_to_device(is_judged, device)
        self.label_index = copy_to_device(label_index, device)
        # [R] the drafts among the A K
        self.judged = copy_to_device(judged, device)
        tokens = F.pad(batch.tokens.flatten(), (0, self.num_drafts))
        # [A, K] tokens of the data before each draft, and at its position.
        self.previous_tokens = tokens[self.token_indices]
        self.tokens = tokens[self.token_indices + 1]
        # [R, W], [R]
        self.hidden = self.select_judged(states)
        self.depths = self.judged % self.num_drafts

    def select_judged(self, slots: Tensor) -> Tensor:
        """Select values [A, K, ..] of the supervised drafts, in order [R, ..]."""
        return slots.flatten(0, 1).index_select(0, self.judged)

    def fill_judged(self, rows: Tensor) -> Tensor:
        """Undo `select_judged` for rows [R]: return [A, K], zero at drafts that are not judged."""
        values = torch.zeros(self.is_judged.numel(), dtype=rows.dtype, device=rows.device)
        return values.index_copy(0, self.judged, rows).view(self.is_judged.shape)

    def normalize_weights(self, weights: Tensor) -> Tensor:
        """Scale weights [A, K] of drafts so that those of a document sum to its number of
        supervised tokens; return [R].
        """
        document, tokens = self.anchors.supervised_tokens
        totals = torch.zeros(len(tokens), device=weights.device).index_add(
            0, document, (weights * self.is_judged).sum(1)
        )
        totals = self.piece.sum_over_processes(totals)
        return self.select_judged(weights * (tokens / totals.clamp(min=1e-9))[document][:, None])

    def decayed_weights(self, decay: float) -> Tensor:
        """Return the normalised loss weights [R] of the drafts: exp(-d / decay), or equal
        weights if the decay is 0.
        """
        depths = torch.arange(self.num_drafts, device=self.is_judged.device)
        weights = (
            torch.exp(-depths / decay) if decay else torch.ones_like(depths, dtype=torch.float32)
        )
        return self.normalize_weights(weights.expand(self.is_judged.shape))

    def judge(self, head: Projection, weights: Tensor) -> DivergenceResult:
        """Return the summed loss of the drafts' states under an output layer, and its predictions,
        with weights [R].
        """
        return self.supervision.judge_with_head(head, self.hidden, self.label_index, weights)

    def sum_losses(self, terms: dict[str, Tensor], predictions: Tensor) -> Losses:
        """Return the losses with hits per depth, from the predictions [R], as draft ids."""
        correct = (
            self.supervision.drafter.draft_ids[predictions]
            == self.supervision.labels[self.label_index]
        )
        return Losses.by_depth(terms, correct, self.depths, self.num_drafts)
