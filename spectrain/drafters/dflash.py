"""DFlash (arXiv 2602.06036): layers that read the target's features draft a block of masks after
the last token in one pass.

Shapes: B batch, K drafts of a block, W width, V draft vocabulary, R judged drafts, A anchors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from spectrain.config.values import Share
from spectrain.drafters.layers.block_drafter import BlockConfig, BlockDrafter
from spectrain.drafters.layers.judged_drafts import JudgedDrafts, SlotStates
from spectrain.drafters.layers.losses import LossName
from spectrain.errors import UserError
from spectrain.kernels.linear_divergence import split_rows
from spectrain.models.target import Target
from spectrain.trees.rollout import MarginalRollout, Rollout

from .base import Losses
from .context import Context
from .step_cost import BatchShape, StepCost


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(BlockConfig):
    """Settings of DFlash."""

    # Loss of each draft token: a cross-entropy or a divergence from the target.
    loss: LossName = "cross_entropy"
    # Labels of a cross-entropy: the data's tokens (data), or the target's most likely tokens
    # (target).
    labels: Literal["data", "target"] = "data"
    # Loss weights of a block's drafts: exponential decay (decay), or D-PACE's probability of
    # reaching each draft (dpace).
    slot_weights: Literal["decay", "dpace"] = "decay"
    # Smoothing of D-PACE from 0 to 1; at 1 the probabilities of earlier drafts have no effect.
    dpace_alpha: Share = 0.5


class DFlash(BlockDrafter):
    """Qwen3 layers over blocks, with the target's fused features injected as keys and values into
    each.

    Slot s, from 1, drafts the token at its own position; with `sample_from_anchor` slot s, from 0,
    drafts the next one, as DeepSpec trains and no engine serves as DFlash. Draft d, from 0, weighs
    exp(-d / decay). With D-PACE (arXiv 2605.18810) it weighs by the probability that the drafts
    before it are accepted: s_k = (1 - alpha) q_k + alpha with the label's probability q_k, P_k =
    s_1 .. s_k, and w_k = sum_{j >= k} P_j, without gradient.
    """

    def __init__(self, target: Target, config: DFlashConfig) -> None:
        super().__init__(target, config)
        if config.slot_weights == "dpace" and config.loss != "cross_entropy":
            raise UserError(
                "drafter.slot_weights=dpace: it needs the labels of a cross-entropy; use "
                "drafter.loss=cross_entropy"
            )
        self.divergence = config.loss
        self.label_source = config.labels
        self.slot_weights, self.dpace_alpha = config.slot_weights, config.dpace_alpha

    # Training

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost, with one more matrix of probabilities for D-PACE."""
        cost = super().step_cost(target, batch)
        copies = cost.judged.copies + (self.slot_weights == "dpace")
        return replace(cost, judged=replace(cost.judged, copies=copies))

    def judge_drafts(self, drafts: JudgedDrafts) -> Losses:
        """Return the losses of the supervised drafts, weighted by depth or by D-PACE."""
        if self.slot_weights == "dpace":
            row_weight = drafts.normalize_weights(self._dpace_weights(drafts))
        else:
            row_weight = drafts.decayed_weights(self.decay)
        judged = drafts.judge(self.projection, row_weight)
        return drafts.sum_losses({self.divergence: judged.loss}, judged.predictions)

    @torch.no_grad()
    def _dpace_weights(self, drafts: JudgedDrafts) -> Tensor:
        """Compute the weights [A, K] of D-PACE."""
        labels = drafts.supervision.label_ids[drafts.label_index]
        rows = [
            self.projection.logits(drafts.hidden[some])
            .log_softmax(-1)
            .gather(-1, labels[some, None])[:, 0]
            .exp()
            for some in split_rows(len(labels))
        ]
        chances = drafts.fill_judged(torch.cat(rows) if rows else drafts.hidden.new_zeros(0))
        reach_probs = torch.where(
            drafts.is_judged, (1 - self.dpace_alpha) * chances + self.dpace_alpha, 1.0
        ).cumprod(1)
        return reach_probs.flip(1).cumsum(1).flip(1)

    # Decoding

    def make_rollout(self, context: Context, slots: SlotStates) -> Rollout:
        """Return a rollout of marginals: the distribution of a slot does not depend on the path."""
        return MarginalRollout(
            context.root, self.log_q(self.compute_products(slots.draft_states)), self.draft_ids
        )
