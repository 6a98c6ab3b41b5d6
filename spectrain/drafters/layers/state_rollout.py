"""A rollout of drafters that read the state of the parent node: EAGLE-3 and MTP layers.

Shapes: B batch, N nodes so far, the root included, F new nodes, D width of a state, V draft
vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from spectrain.models.kv_cache import TreeCache
from spectrain.trees.rollout import BranchVisibility, Rollout


class StateDrafter(Protocol):
    """A drafter that computes a node's state from its token and its parent's state."""

    def run(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        cache: TreeCache,
        visible: Tensor | None,
    ) -> Tensor:
        """Run new nodes, append them to the cache, and return their states [B, F, D]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [B, F, V] from states [B, F, D], which may be of half precision."""

    def log_q(self, hidden: Tensor) -> Tensor:
        """Compute log q [B, F, V] from states [B, F, D]."""


class StateRollout(Rollout):
    """A rollout from the root's state [B, 1, D], which is committed, one level of nodes after
    another.
    """

    def __init__(
        self, drafter: StateDrafter, cache: TreeCache, root: Tensor, draft_ids: Tensor | None = None
    ) -> None:
        self.drafter, self.cache, self.draft_ids = drafter, cache, draft_ids
        self.hidden = root  # [B, N, D]
        self.branches = BranchVisibility(len(root), root.device)
        self.gives_logits = False

    def request_logits(self) -> bool:
        self.gives_logits = True
        return True

    def start(self) -> Tensor:
        return self._outputs_after(self.hidden)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        hidden = self.hidden.gather(1, parents[..., None].expand(-1, -1, self.hidden.shape[-1]))
        depth, visible = self.branches.add_nodes(parents)
        positions = self.cache.lengths[:, None] - 1 + depth
        output = self.drafter.run(tokens, hidden, positions, self.cache, visible)
        self.hidden = torch.cat([self.hidden, output], dim=1)
        return self._outputs_after(output)

    def _outputs_after(self, hidden: Tensor) -> Tensor:
        """Return log q [B, F, V] from states [B, F, D], or logits where these were requested."""
        return self.drafter.logits(hidden) if self.gives_logits else self.drafter.log_q(hidden)
