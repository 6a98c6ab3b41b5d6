"""XPress (arXiv 2608.02438): DFlash's block with a low-rank causal refiner, which is applied to the
whole block several times.

Shapes: B batch, A anchors, S slots of a block, K drafts of it, W width, M rank of the refiner, V
draft vocabulary, R judged drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.config.values import Count, NotNegative, Number, Steps, Width
from spectrain.drafters.base import Losses
from spectrain.drafters.context import Context
from spectrain.drafters.layers.block_drafter import BlockConfig
from spectrain.drafters.layers.judged_drafts import JudgedDrafts, SlotStates
from spectrain.drafters.layers.low_rank_blocks import CombinedLoss, LowRankDrafter
from spectrain.drafters.step_cost import BatchShape, Run, StepCost
from spectrain.models.target import Target
from spectrain.trees.growing import ChildDraw
from spectrain.trees.rollout import MarginalRollout, Rollout


class Refiner(nn.Module):
    """The states of the correction at every slot of a block, from the block's states and the token
    before each slot.

    a_k = W_in [D_h z_k ; D_g mean_j z_j ; E(token before k)], c_k = a_k + sum_{j <= k} L[:, k, j]
    a_j, and the result is c_k + W_d (silu(W_g c_k) W_u c_k). L [M, S, S] is a mixer of slots for
    every channel, which starts as zeros.
    """

    def __init__(
        self, sizes: tuple[int, int, int], rank: int, mlp_ratio: int, block_size: int
    ) -> None:
        super().__init__()
        vocab_size, draft_vocab_size, width = sizes
        self.token_embed = nn.Embedding(vocab_size, rank)
        self.down_h, self.down_g = (nn.Linear(width, rank, bias=False) for _ in range(2))
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mlp_gate, self.mlp_up = (
            nn.Linear(rank, mlp_ratio * rank, bias=False) for _ in range(2)
        )
        self.mlp_down = nn.Linear(mlp_ratio * rank, rank, bias=False)
        self.readout = nn.Linear(rank, draft_vocab_size, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, block_size, block_size))
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def project_block(self, states: Tensor) -> Tensor:
        """Project the states [A, S, W] of a block to the part [A, S, 2 M] of the refiner's input
        that no pass changes.
        """
        mean = self.down_g(states.mean(1, keepdim=True))
        return torch.cat([self.down_h(states), mean.expand(-1, states.shape[1], -1)], dim=-1)

    def forward(self, block: Tensor, before: Tensor) -> Tensor:
        """Return the correction's states [A, S, M] from a projected block and the tokens [A, S]
        before its slots.
        """
        embedded = self.token_embed(before).to(block.dtype)
        a = self.in_proj(torch.cat([block, embedded], dim=-1))
        c = a + torch.einsum("mkj,ajm->akm", self.mix_l.tril().to(a.dtype), a)
        return c + self.mlp_down(F.silu(self.mlp_gate(c)) * self.mlp_up(c))


@dataclass(frozen=True, kw_only=True)
class XPressConfig(BlockConfig):
    """Settings of XPress."""

    # Rank of the refiner.
    rank: Width = 256
    # Inner width of the refiner's feed-forward part, in ranks.
    mlp_ratio: Count = 2
    # Number of times that decoding applies the refiner to a block.
    num_passes: Steps = 6
    # Number of passes over the drafter's own drafts in training; 0 trains on the data's tokens
    # alone.
    consistency_passes: Number = 3
    # Weight of the mean loss of these passes.
    consistency_weight: NotNegative = 0.3
    # Weight of the loss of DFlash's own logits.
    base_weight: NotNegative = 0.6
    # Weight of the cross-entropy with the data.
    ce: NotNegative = 0.1
    # Weight of the total variation distance from the target.
    tv: NotNegative = 0.9
    # Decay length of the loss weights in slots: draft d, from 0, weighs exp(-d / decay); 0 weighs
    # all drafts alike.
    decay: NotNegative = 4.0


class XPress(LowRankDrafter):
    """DFlash's parallel logits U z plus R c, whose refiner reads the drafts before each slot, all
    slots at once.

    Decoding drafts the block from U z, then `num_passes` times from the corrected logits of the
    last drafts. After m passes the first m drafts are those of drafting from left to right. Draws
    are coupled: every pass uses the noise with which the tree builder draws, so that a pass that
    changes nothing is the last one that would. q is that of the last pass with the drafts that it
    read; they follow from the noise of earlier slots alone, so rules that weigh p against q stay
    exact.

    The loss of logits is ce CE(data) + tv TV(p, q), weighted by exp(-d / decay). It is summed over
    the corrected logits after the data's tokens, `consistency_weight` times the mean over passes
    that read the drafts of the pass before, and `base_weight` times DFlash's own logits.
    """

    saved = replace(
        LowRankDrafter.saved, shape=(*LowRankDrafter.saved.shape, "block_size", "rank", "mlp_ratio")
    )

    def __init__(self, target: Target, config: XPressConfig) -> None:
        super().__init__(target, config)
        self.divergence = "total_variation"
        self.ce, self.tv, self.num_passes = config.ce, config.tv, config.num_passes
        self.consistency_passes, self.consistency_weight = (
            config.consistency_passes,
            config.consistency_weight,
        )
        self.base_weight = config.base_weight
        sizes = target.head.vocab_size, len(self.d2t), target.width
        self.refiner_head = Refiner(sizes, config.rank, config.mlp_ratio, config.block_size)

    @property
    def readout(self) -> nn.Linear:
        return self.refiner_head.readout

    def tokens_before(self, first: Tensor, roots: Tensor, drafts: Tensor) -> Tensor:
        """Return the tokens [A, S] before the slots of blocks, from the tokens [A] before their
        roots and the drafts [A, K].
        """
        tokens = torch.cat([first[:, None], roots[:, None], drafts[:, :-1]], dim=1)
        return tokens[:, 1 - self.first_draft_slot :]

    def refine(self, block: Tensor, before: Tensor) -> Tensor:
        """Return the correction's states [A, K, M] of the drafting slots."""
        return self.refiner_head(block, before)[:, self.first_draft_slot :]

    # Training

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return DFlash's cost with the refiner over all slots in every pass, and the losses of
        all passes.
        """
        cost = super().step_cost(target, batch)
        refiner = self.refiner_head
        passes = 1 + self.consistency_passes
        slots = cost.judged.rows / self.num_drafts * self.block_size
        rank = self.readout.in_features
        # Three inputs, what the mixer reads and returns, the activation and product of the
        # feed-forward part instead of its result, and the gradient of the joint layer's input.
        drafts = self.num_drafts / self.block_size
        extra = 4 * rank + 2 * refiner.mlp_down.in_features + (target.width + rank) * drafts
        layers = [refiner.in_proj, refiner.mlp_gate, refiner.mlp_up, refiner.mlp_down]
        runs = [
            *cost.runs,
            Run(refiner.down_h, slots, 0),
            Run(refiner.down_g, slots / self.block_size, 0),
            Run(nn.ModuleList(layers), slots, 0, calls=passes, extra=extra),
        ]
        # Two products with DFlash's own output layer, which has no gradient.
        judged = replace(cost.judged, layers=passes, other_rows=2 * cost.judged.rows)
        return replace(cost, runs=runs, judged=judged)

    def judge_drafts(self, drafts: JudgedDrafts) -> Losses:
        """Return the losses of the corrected logits, of passes over the drafter's own drafts,
        and of DFlash's logits.
        """
        weights = drafts.decayed_weights(self.decay)
        loss = CombinedLoss(self.ce, self.tv)
        block = self.refiner_head.project_block(drafts.slots.all_states)
        head = self.joint_projection
        roots = drafts.previous_tokens[:, 0]
        base = loss.judge(drafts, drafts.hidden, self.projection, weights)
        inputs = drafts.tokens
        results = []
        for number in range(1 + self.consistency_passes):
            before = self.tokens_before(tokens_before_anchors(drafts), roots, inputs)
            terms = drafts.select_judged(self.refine(block, before))
            results.append(
                loss.judge(drafts, torch.cat([drafts.hidden, terms], dim=-1), head, weights)
            )
            # The first pass after the data's tokens reads DFlash's own drafts, and each further one
            # those of the last pass.
            read = results[-1] if number else base
            inputs = drafts.fill_judged(self.draft_ids[read.predictions])
        losses = {"refined": results[0].loss, "base": self.base_weight * base.loss}
        if self.consistency_passes:
            mean = torch.stack([result.loss for result in results[1:]]).mean()
            losses["consistency"] = self.consistency_weight * mean
        return drafts.sum_losses(losses, results[0].predictions)

    # Decoding

    def make_rollout(self, context: Context, slots: SlotStates) -> Rollout:
        """Return a rollout of the marginals of the last pass."""
        products = self.compute_products(slots.draft_states)
        block = self.refiner_head.project_block(slots.all_states)
        draw = ChildDraw.of_round(context.builder, context)
        lengths, tokens = context.lengths, context.tokens
        first = torch.where(
            lengths > 0, tokens.gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0], context.root
        )
        log_q = self.log_q(products)
        nodes = torch.arange(self.num_drafts, device=products.device)[None]
        for _ in range(self.num_passes):
            drafts = self.draft_ids[draw.pick(log_q, nodes, 1)[0][..., 0]]
            terms = self.refine(block, self.tokens_before(first, context.root, drafts))
            log_q = self.corrected_log_q(products, terms)
        return MarginalRollout(context.root, log_q, self.draft_ids)


def tokens_before_anchors(drafts: JudgedDrafts) -> Tensor:
    """Return the token [A] before each anchor; the anchor itself at the start of a document."""
    anchors = drafts.anchors
    indices = anchors.token_indices
    return drafts.batch.tokens.flatten()[torch.where(anchors.positions > 0, indices - 1, indices)]
