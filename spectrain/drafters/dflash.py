"""DFlash (arXiv 2602.06036): a block of masks behind the newest token, said in one pass by layers that read the target.

Shapes: B batch, K drafts of a block, W width, V draft vocabulary, R judged drafts, A anchors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from spectrain.config.values import Count, NotNegative, Seed, Share, Steps, VocabularySize
from spectrain.drafters.layers.block_drafter import BlockDrafter, BlockSettings, JudgedDrafts
from spectrain.drafters.layers.losses import LossName
from spectrain.errors import UserError
from spectrain.kernels.linear_divergence import split_rows
from spectrain.trees.base import MarginalRollout, Rollout

from .base import Losses

if TYPE_CHECKING:
    from spectrain.models.target import Target


class DFlash(BlockDrafter):
    """Qwen3 layers over blocks, with the target's fused features injected as keys and values into each.

    Slot s, from 1, drafts the token at its own place; with `sample_from_anchor` slot s, from 0, drafts the one after it, as
    DeepSpec trains and no engine serves as DFlash. Draft d, from 0, weighs exp(-d / decay), or by D-PACE (arXiv 2605.18810)
    as much as the drafts before it are likely to be kept: with s_k = (1 - alpha) q_k + alpha of the right token's chance q_k
    and P_k = s_1 .. s_k, w_k = sum_{j >= k} P_j, held constant.
    """

    def __init__(
        self,
        target: Target,
        # Number of slots in a block, the anchor's slot included.
        block_size: Steps = 16,
        # Number of decoder layers of the drafter.
        num_layers: Count = 5,
        # Layers of the target whose hidden states are fused; null uses the family's default layers.
        layers: list[int] | None = None,
        # Draft vocabulary in tokens; null uses the target's whole vocabulary.
        vocab_size: VocabularySize | None = None,
        # Loss of each draft token: a cross-entropy or a divergence from the target.
        loss: LossName = "cross_entropy",
        # Labels of a cross-entropy: the data's tokens (data), or the target's most likely tokens (target).
        labels: Literal["data", "target"] = "data",
        # Loss weights of a block's drafts: exponential decay (decay), or D-PACE's probability of reaching each draft (dpace).
        slot_weights: Literal["decay", "dpace"] = "decay",
        # Decay length of the loss weights in slots: draft d, from 0, weighs exp(-d / decay); 0 weighs all drafts alike.
        decay: NotNegative = 7.0,
        # Smoothing of D-PACE from 0 to 1; at 1 the probabilities of earlier drafts have no effect.
        dpace_alpha: Share = 0.5,
        # Number of anchors that are trained per document.
        num_anchors: Count = 512,
        # Whether each slot drafts the token after its own position, instead of the token at it.
        sample_from_anchor: bool = False,
        # Whether attention inside a block is causal.
        causal: bool = False,
        # Number of preceding positions that a slot attends to; null attends to all of them.
        window: Count | None = None,
        # Token id of the mask; null picks an id that no text of the target holds.
        mask_token_id: int | None = None,
        # True trains an input embedding of the drafter's own, with the mask token's row; false uses the target's, frozen.
        own_embedding: bool = False,
        # Configuration keys of the drafter's layers that differ from the target's; null copies the target's.
        architecture: dict[str, Any] | None = None,
        # Initial values of fc and the final norm: the target's (target), or random ones (random).
        start: Literal["target", "random"] = "target",
        # Seed of the drafter's random choices.
        seed: Seed = 0,
    ) -> None:
        super().__init__(
            target,
            BlockSettings(
                block_size, num_layers, layers, vocab_size, sample_from_anchor, causal, window, num_anchors, mask_token_id,
                own_embedding, architecture, start, seed,
            ),
        )  # fmt: skip
        if slot_weights == "dpace" and loss != "cross_entropy":
            raise UserError("drafter.slot_weights=dpace: it weighs a cross-entropy; use drafter.loss=cross_entropy")
        self.divergence, self.label_source, self.slot_weights = loss, labels, slot_weights
        self.decay, self.dpace_alpha = decay, dpace_alpha

    # Training

    def judge_drafts(self, asked: JudgedDrafts) -> Losses:
        dpace = self.slot_weights == "dpace"
        row_weight = asked.normalize_weights(self._dpace(asked)) if dpace else asked.decayed_weights(self.decay)
        judged = asked.supervision.judge_with_head(self.projection, asked.hidden, asked.label_index, row_weight)
        return asked.sum_losses({self.divergence: judged.loss}, judged.predictions)

    @torch.no_grad()
    def _dpace(self, asked: JudgedDrafts) -> Tensor:
        """[A, K] the weights of D-PACE."""
        right = asked.supervision.label_ids[asked.label_index]
        rows = [
            self.projection.logits(asked.hidden[some]).log_softmax(-1).gather(-1, right[some, None])[:, 0].exp()
            for some in split_rows(len(right))
        ]
        chances = torch.ones(asked.is_judged.shape, device=right.device)
        chances[asked.is_judged] = torch.cat(rows)[asked.order.argsort()] if rows else chances[asked.is_judged]
        kept = torch.where(asked.is_judged, (1 - self.dpace_alpha) * chances + self.dpace_alpha, 1.0).cumprod(1)
        return kept.flip(1).cumsum(1).flip(1)

    # Decoding

    def make_rollout(self, root: Tensor, states: Tensor) -> Rollout:
        """What a slot says does not depend on the path, so a tree's paths are products of marginals."""
        return MarginalRollout(root, self.log_q(self.compute_products(states)), self.draft_ids)
