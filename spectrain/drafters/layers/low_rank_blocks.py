"""Block drafters whose logits have a low-rank term for the earlier tokens of the block: DSpark,
Domino and XPress.

Shapes: B batch, A anchors, K drafts of a block, F frontier nodes, W width, M rank of the term, V
draft vocabulary, R judged drafts.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor, nn

from spectrain.kernels.linear_divergence import DivergenceResult, Projection, linear_divergence
from spectrain.models.target import Target
from spectrain.trees.rollout import DepthRollout

from ..step_cost import BatchShape, StepCost
from .block_drafter import BlockDrafter
from .judged_drafts import JudgedDrafts
from .losses import acceptance_rate


class LowRankDrafter(BlockDrafter):
    """A block drafter with the logits U z + R m: U is the output layer, z [W] a slot's state, and m
    [M] the term's state, which depends on earlier tokens of the block. Training judges [z ; m]
    under the joint layer [U ; R], so no logits are stored."""

    @property
    @abstractmethod
    def readout(self) -> nn.Linear:
        """The layer R [V, M] of the term."""

    @property
    def joint_projection(self) -> Projection:
        """The joint output layer [U ; R] with the target's scale and cap."""
        head = self.projection
        return replace(
            head, weight=torch.cat([head.weight, self.readout.weight.to(head.weight.dtype)], dim=1)
        )

    def corrected_log_q(self, products: Tensor, terms: Tensor) -> Tensor:
        """Compute log q [.., V] from products [.., V] of the output layer and the states [.., M]
        of the term.
        """
        return self.log_q(products + self.readout(terms).float())

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of a block drafter whose output layer also reads the term's state."""
        cost = super().step_cost(target, batch)
        # The gradient of the joint layer, which is always trained, takes a transposed copy.
        judged = replace(
            cost.judged,
            copies=max(2, cost.judged.copies),
            width=target.width + self.readout.in_features,
            is_trained=True,
        )
        return replace(cost, judged=judged)


class CombinedLoss:
    """Computes ce CE(data) + distance (1 - sum_v min(p, q)) of chunks of rows, and records each
    row's acceptance rate.
    """

    def __init__(self, ce: float, distance: float) -> None:
        self.ce, self.distance = ce, distance
        self.acceptance_rates: list[Tensor] = []  # [r] of each chunk, in order

    def __call__(
        self, log_p: Tensor, log_q: Tensor, labels: Tensor, in_vocabulary: Tensor
    ) -> Tensor:
        rate = acceptance_rate(log_p, log_q)
        self.acceptance_rates.append(rate.detach())
        cross_entropy = -log_q.gather(-1, labels[:, None])[:, 0]
        return self.ce * cross_entropy * in_vocabulary + self.distance * (1 - rate)

    def judge(
        self, drafts: JudgedDrafts, states: Tensor, head: Projection, weights: Tensor
    ) -> DivergenceResult:
        """Return the summed loss of states [R, ..] under an output layer, and its predictions."""
        supervision, drafter = drafts.supervision, drafts.supervision.drafter
        assert supervision.target_log_probs is not None
        tokens = drafts.select_judged(drafts.tokens)
        labels = torch.searchsorted(drafter.draft_ids, tokens).clamp(max=len(drafter.draft_ids) - 1)
        target_log_probs = supervision.target_log_probs.select_rows(drafts.label_index)
        return linear_divergence(
            states, head, target_log_probs, self, weights, (labels, drafter.t2d[tokens])
        )


class CarriedRollout(DepthRollout):
    """A rollout whose nodes carry a state [M] along their path."""

    def __init__(self, root: Tensor, depth_limit: int, state: Tensor) -> None:
        super().__init__(root, depth_limit)
        self.carried = state[:, None]  # [B, nodes so far, M]

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        parent_states = self.carried.gather(
            1, parents[..., None].expand(-1, -1, self.carried.shape[-1])
        )
        self.carried = torch.cat([self.carried, parent_states], dim=1)
        return super().extend(tokens, parents)

    def log_probs_at(self, depth: Tensor, tokens: Tensor) -> Tensor:
        count = tokens.shape[1]
        log_q, state = self.step(depth, tokens, self.carried[:, -count:])
        self.carried = torch.cat([self.carried[:, :-count], state], dim=1)
        return log_q

    @abstractmethod
    def step(self, depth: Tensor, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return log q [B, F, V] after nodes, and their states [B, F, M], from the states of
        their parents.
        """
