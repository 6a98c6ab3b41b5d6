"""DFlash (arXiv 2602.06036): a block of masks behind the newest token, said in one pass by layers that read the target.

Shapes: B batch, K drafts of a block, W width, V draft vocabulary, R judged drafts, A anchors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from spectrain.config.values import Share
from spectrain.drafters.layers.block_drafter import BlockConfig, BlockDrafter
from spectrain.drafters.layers.judged_drafts import JudgedDrafts
from spectrain.drafters.layers.losses import LossName
from spectrain.errors import UserError
from spectrain.kernels.linear_divergence import split_rows
from spectrain.models.step_cost import BatchShape, StepCost
from spectrain.trees.base import MarginalRollout, Rollout

from .base import Losses

if TYPE_CHECKING:
    from spectrain.models.target import Target


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(BlockConfig):
    """Settings of DFlash."""

    # Loss of each draft token: a cross-entropy or a divergence from the target.
    loss: LossName = "cross_entropy"
    # Labels of a cross-entropy: the data's tokens (data), or the target's most likely tokens (target).
    labels: Literal["data", "target"] = "data"
    # Loss weights of a block's drafts: exponential decay (decay), or D-PACE's probability of reaching each draft (dpace).
    slot_weights: Literal["decay", "dpace"] = "decay"
    # Smoothing of D-PACE from 0 to 1; at 1 the probabilities of earlier drafts have no effect.
    dpace_alpha: Share = 0.5


class DFlash(BlockDrafter):
    """Qwen3 layers over blocks, with the target's fused features injected as keys and values into each.

    Slot s, from 1, drafts the token at its own place; with `sample_from_anchor` slot s, from 0, drafts the one after it, as
    DeepSpec trains and no engine serves as DFlash. Draft d, from 0, weighs exp(-d / decay), or by D-PACE (arXiv 2605.18810)
    as much as the drafts before it are likely to be kept: with s_k = (1 - alpha) q_k + alpha of the right token's chance q_k
    and P_k = s_1 .. s_k, w_k = sum_{j >= k} P_j, held constant.
    """

    def __init__(self, target: Target, config: DFlashConfig) -> None:
        super().__init__(target, config)
        if config.slot_weights == "dpace" and config.loss != "cross_entropy":
            raise UserError("drafter.slot_weights=dpace: it weighs a cross-entropy; use drafter.loss=cross_entropy")
        self.divergence, self.label_source = config.loss, config.labels
        self.slot_weights, self.dpace_alpha = config.slot_weights, config.dpace_alpha

    # Training

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """D-PACE's weights take another matrix of probabilities."""
        cost = super().step_cost(target, batch)
        copies = cost.judged.copies + (self.slot_weights == "dpace")
        return replace(cost, judged=replace(cost.judged, copies=copies))

    def judge_drafts(self, drafts: JudgedDrafts) -> Losses:
        dpace = self.slot_weights == "dpace"
        row_weight = drafts.normalize_weights(self._dpace_weights(drafts)) if dpace else drafts.decayed_weights(self.decay)
        judged = drafts.supervision.judge_with_head(self.projection, drafts.hidden, drafts.label_index, row_weight)
        return drafts.sum_losses({self.divergence: judged.loss}, judged.predictions)

    @torch.no_grad()
    def _dpace_weights(self, drafts: JudgedDrafts) -> Tensor:
        """[A, K] the weights of D-PACE."""
        right = drafts.supervision.label_ids[drafts.label_index]
        rows = [
            self.projection.logits(drafts.hidden[some]).log_softmax(-1).gather(-1, right[some, None])[:, 0].exp()
            for some in split_rows(len(right))
        ]
        chances = torch.ones(drafts.is_judged.shape, device=right.device)
        chances[drafts.is_judged] = torch.cat(rows)[drafts.order.argsort()] if rows else chances[drafts.is_judged]
        reach_probs = torch.where(drafts.is_judged, (1 - self.dpace_alpha) * chances + self.dpace_alpha, 1.0).cumprod(1)
        return reach_probs.flip(1).cumsum(1).flip(1)

    # Decoding

    def make_rollout(self, root: Tensor, states: Tensor) -> Rollout:
        """What a slot says does not depend on the path, so a tree's paths are products of marginals."""
        return MarginalRollout(root, self.log_q(self.compute_products(states)), self.draft_ids)
