"""Drafting level by level with a drafter that reads its own last state: EAGLE-3 and MTP layers.

Shapes: B batch, N nodes given so far, the root the first, F new ones of them, D width of a state, V draft vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from spectrain.models.kv_cache import TreeCache
from spectrain.trees.base import BranchVisibility, Rollout


class StateDrafter(Protocol):
    """A drafter that makes a node's state of its token and its parent's state."""

    def run(self, tokens: Tensor, hidden: Tensor, positions: Tensor, cache: TreeCache, visible: Tensor | None) -> Tensor:
        """[B, F, D] of new nodes, appended to the cache behind what it holds."""

    def log_q(self, hidden: Tensor) -> Tensor:
        """[B, F, D] -> [B, F, V]"""


class StateRollout(Rollout):
    """One round: the root's state [B, 1, D], then one level of nodes after another behind the committed pairs."""

    def __init__(self, drafter: StateDrafter, cache: TreeCache, root: Tensor, draft_ids: Tensor | None = None) -> None:
        self.drafter, self.cache, self.draft_ids = drafter, cache, draft_ids
        self.hidden = root  # [B, N, D]
        self.branches = BranchVisibility(len(root), root.device)  # the root itself is committed

    def start(self) -> Tensor:
        return self.drafter.log_q(self.hidden)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        hidden = self.hidden.gather(1, parents[..., None].expand(-1, -1, self.hidden.shape[-1]))
        depth, visible = self.branches.add_nodes(parents)
        positions = self.cache.lengths[:, None] - 1 + depth
        output = self.drafter.run(tokens, hidden, positions, self.cache, visible)
        self.hidden = torch.cat([self.hidden, output], dim=1)
        return self.drafter.log_q(output)
