"""Domino (arXiv 2605.29707): DFlash's block with a correction by a GRU over the earlier tokens of
the block.

Shapes: B batch, A anchors, K drafts of a block, F frontier nodes, W width, G width of the GRU, M
width of the correction, V draft vocabulary, R judged drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.config.values import Number, Share, Width
from spectrain.drafters.base import Losses
from spectrain.drafters.context import Context
from spectrain.drafters.layers.block_drafter import BlockConfig
from spectrain.drafters.layers.judged_drafts import JudgedDrafts, SlotStates
from spectrain.drafters.layers.low_rank_blocks import CarriedRollout, LowRankDrafter
from spectrain.drafters.layers.vocabulary import embed_as_target
from spectrain.drafters.step_cost import BatchShape, Run, StepCost
from spectrain.models.target import Target
from spectrain.trees.rollout import Rollout, gather_by_depth


@dataclass(frozen=True, kw_only=True)
class DominoConfig(BlockConfig):
    """Settings of Domino."""

    # Width of the state of the GRU.
    gru_width: Width = 1024
    # Width of the correction's hidden layer, which is the rank of the correction.
    rank: Width = 256
    # Number of first drafts whose logits stay DFlash's.
    uncorrected: Number = 1
    # Weight of the cross-entropy of DFlash's own logits at the start of the training; it falls
    # linearly to 0.
    base_weight: Share = 1.0
    # Share of the training after which that weight is 0; 0 trains the corrected logits alone.
    base_share: Share = 0.5
    # Whether each slot drafts the token after its own position, instead of the token at it.
    sample_from_anchor: bool = True


class Domino(LowRankDrafter):
    """DFlash's parallel logits plus W2 silu(W1 [z_d ; s_d]) for draft d: s_d is a GRU's state over
    the tokens up to the one before it, which starts as zeros at the anchor and reads the target's
    embeddings.

    The loss is (1 - lam) CE(corrected) + lam CE(DFlash's own), both of the data's tokens and
    weighted by exp(-d / decay); lam falls from `base_weight` to 0 in `base_share` of the training.
    """

    saved = replace(
        LowRankDrafter.saved,
        shape=(*LowRankDrafter.saved.shape, "gru_width", "rank", "uncorrected"),
    )
    label_source = "data"

    def __init__(self, target: Target, config: DominoConfig) -> None:
        super().__init__(target, config)
        self.divergence = "cross_entropy"
        self.uncorrected = config.uncorrected
        self.base_weight, self.base_share = config.base_weight, config.base_share
        self.prefix_gru = nn.GRU(target.width, config.gru_width, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(target.width + config.gru_width, config.rank, bias=False),
            nn.SiLU(),
            nn.Linear(config.rank, len(self.d2t), bias=False),
        )
        nn.init.normal_(self.readout.weight, std=0.01)

    @property
    def readout(self) -> nn.Linear:
        return self.embed_proj[2]  # type: ignore[return-value]

    def correct(self, states: Tensor, prefixes: Tensor, depths: Tensor) -> Tensor:
        """Return the correction's states [.., M] from slots' states [.., W], GRU states [.., G]
        and draft numbers [..].
        """
        terms = F.silu(self.embed_proj[0](torch.cat([states, prefixes.to(states.dtype)], dim=-1)))
        return terms * (depths >= self.uncorrected)[..., None]

    # Training

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return DFlash's cost with the GRU over every slot, the correction and both losses."""
        cost = super().step_cost(target, batch)
        slots = cost.judged.rows / self.num_drafts * self.block_size
        runs = [
            *cost.runs,
            Run(self.prefix_gru, slots, 0, extra=target.width),
            Run(self.embed_proj[0], cost.judged.rows, 0, extra=target.width),
        ]
        # Two products with DFlash's own output layer, which has no gradient.
        judged = replace(cost.judged, other_rows=2 * cost.judged.rows)
        return replace(cost, runs=runs, judged=judged)

    def judge_drafts(self, drafts: JudgedDrafts) -> Losses:
        """Return the cross-entropies of the corrected logits and of DFlash's own."""
        prefixes = drafts.select_judged(
            self.prefix_gru(embed_as_target(self, drafts.previous_tokens))[0]
        )
        terms = self.correct(drafts.hidden, prefixes, drafts.depths)
        weights = drafts.decayed_weights(self.decay)
        joint = torch.cat([drafts.hidden, terms], dim=-1)
        judged = drafts.supervision.judge_with_head(
            self.joint_projection, joint, drafts.label_index, weights
        )
        base_weight = self.base_weight_at(drafts.progress)
        losses = {"corrected": (1 - base_weight) * judged.loss}
        if base_weight:
            base = drafts.judge(self.projection, weights)
            losses["base"] = base_weight * base.loss
        return drafts.sum_losses(losses, judged.predictions)

    def base_weight_at(self, progress: float) -> float:
        """Return the weight of DFlash's own logits after a share of the training."""
        return (
            self.base_weight * max(0.0, 1 - progress / self.base_share) if self.base_share else 0.0
        )

    # Decoding

    def make_rollout(self, context: Context, slots: SlotStates) -> Rollout:
        """Return a rollout over the first slots: the last one of a shifted block is trained and
        drafts nothing.
        """
        return _Corrected(self, context.root, slots.draft_states[:, : max(1, self.block_size - 1)])


class _Corrected(CarriedRollout):
    """Drafts one round: every node carries the GRU's state after its token."""

    def __init__(self, drafter: Domino, root: Tensor, states: Tensor) -> None:
        super().__init__(
            root, states.shape[1], states.new_zeros(len(root), drafter.prefix_gru.hidden_size)
        )
        # [B, K, W], [B, K, V]
        self.drafter = drafter
        self.states = states
        self.products = drafter.compute_products(states)
        self.draft_ids = drafter.draft_ids

    def step(self, depth: Tensor, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        drafter = self.drafter
        flat, _ = drafter.prefix_gru(
            embed_as_target(drafter, tokens).flatten(0, 1)[:, None],
            state.flatten(0, 1)[None].contiguous(),
        )
        state = flat[:, 0].unflatten(0, tokens.shape)
        terms = drafter.correct(gather_by_depth(self.states, depth), state, depth)
        return drafter.corrected_log_q(gather_by_depth(self.products, depth), terms), state
