"""A rollout of several drafters that vote on one tree. Shapes: B batch, F nodes, K drafters, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectrain.trees.rollout import Rollout


class VotingRollout(Rollout):
    """Drafts by the weighted majority of several drafters (Minions, Wang et al., 2024).

    q of a token is the weight of the drafters whose most likely token it is, as a share of the
    drafters that have a draft. It is fixed before a token is drawn from it.
    """

    def __init__(
        self, rollouts: Sequence[Rollout], weights: Sequence[float], vocab_size: int
    ) -> None:
        self.rollouts, self.weights, self.vocab_size = rollouts, weights, vocab_size
        limits = [rollout.depth_limit for rollout in rollouts if rollout.depth_limit is not None]
        self.depth_limit = min(limits, default=None)

    def start(self) -> Tensor:
        return self._count_votes([rollout.start() for rollout in self.rollouts])

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self._count_votes([rollout.extend(tokens, parents) for rollout in self.rollouts])

    def _count_votes(self, log_qs: list[Tensor]) -> Tensor:
        """Return log q [B, F, V] of the vote, from each drafter's log q [B, F, its vocabulary]."""
        votes = torch.zeros(*log_qs[0].shape[:2], self.vocab_size, device=log_qs[0].device)
        for rollout, log_q, weight in zip(self.rollouts, log_qs, self.weights):
            vote = torch.full(log_q.shape[:2], weight, device=log_q.device)
            if rollout.stop_mask is not None:
                vote = vote.masked_fill(rollout.stop_mask, 0.0)
            votes.scatter_add_(
                -1, rollout.to_target_ids(log_q.argmax(-1, keepdim=True)), vote[..., None]
            )
        total = votes.sum(-1, keepdim=True)
        self.stop_mask = total[..., 0] == 0
        return torch.where(
            total > 0, (votes / total).log(), -torch.log(torch.tensor(float(self.vocab_size)))
        )
