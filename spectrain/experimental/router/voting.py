"""Several drafters that draft one tree together. Shapes: B batch, F nodes, K drafters, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectrain.trees.base import Rollout


class VotingRollout(Rollout):
    """q of a token is the weight of the drafters whose first choice it is, as a share of those that know anything
    (Minions, Wang et al., 2024: the majority of several small models). It is fixed before a token is drawn from it."""

    def __init__(self, rollouts: Sequence[Rollout], weights: Sequence[float], vocab_size: int) -> None:
        self.rollouts, self.weights, self.vocab_size = rollouts, weights, vocab_size
        limits = [rollout.depth_limit for rollout in rollouts if rollout.depth_limit is not None]
        self.depth_limit = min(limits, default=None)

    def start(self) -> Tensor:
        return self._count_votes([rollout.start() for rollout in self.rollouts])

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self._count_votes([rollout.extend(tokens, parents) for rollout in self.rollouts])

    def _count_votes(self, said: list[Tensor]) -> Tensor:
        """Log q [B, F, V] of what each drafter says, [B, F, its vocabulary]."""
        votes = torch.zeros(*said[0].shape[:2], self.vocab_size, device=said[0].device)
        for rollout, log_q, weight in zip(self.rollouts, said, self.weights):
            counted = torch.full(log_q.shape[:2], weight, device=log_q.device)
            if rollout.stop_mask is not None:
                counted = counted.masked_fill(rollout.stop_mask, 0.0)
            votes.scatter_add_(-1, rollout.to_target_ids(log_q.argmax(-1, keepdim=True)), counted[..., None])
        total = votes.sum(-1, keepdim=True)
        self.stop_mask = total[..., 0] == 0
        return torch.where(total > 0, (votes / total).log(), -torch.log(torch.tensor(float(self.vocab_size))))
