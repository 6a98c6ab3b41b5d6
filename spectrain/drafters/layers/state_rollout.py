"""Drafters that read the state of the parent node, EAGLE's and MTP layers, and their rollout.

Shapes: B batch, P new positions, N nodes so far, the root included, F new nodes, D width of a
state, V draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from spectrain.drafters.capabilities import Capture
from spectrain.drafters.context import Context
from spectrain.models.features import Features
from spectrain.models.kv_cache import TreeCache
from spectrain.trees.rollout import BranchVisibility, Rollout
from spectrain.trees.token_tree import AcceptedPath

from .vocabulary import VocabularyDrafter


class StateDrafter(VocabularyDrafter):
    """A drafter that computes a node's state from its token and its parent's state, and whose
    layers read a cache of the text.
    """

    capabilities = replace(VocabularyDrafter.capabilities, capture=Capture(state_names=("cache",)))
    cache: TreeCache | None = None
    # Number of layers that have keys and values in the cache.
    num_layers = 1

    @abstractmethod
    def fuse_features(self, features: Features) -> Tensor:
        """Return the states [B, P, D] that take the places of the drafter's own at positions that
        the target has run.
        """

    @abstractmethod
    def run(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        cache: TreeCache,
        visible: Tensor | None,
    ) -> Tensor:
        """Run new nodes, which read their parents' states `hidden`, append them to the cache, and
        return their states [B, F, D]. `visible` says which nodes each one sees; None means the
        new ones up to itself.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [B, F, V] from states [B, F, D], which may be of half precision."""

    def log_q(self, hidden: Tensor) -> Tensor:
        """Compute log q [B, F, V] from states [B, F, D]."""
        return self.logits(hidden).float().log_softmax(-1)

    def read_accepted(self, context: Context) -> tuple[Tensor, TreeCache]:
        """Read the features of the last accepted tokens; return the root's state [B, 1, D] and
        the drafter's cache.
        """
        cache = self.open_cache(context)
        hidden = self.fuse_features(context.new_features)
        slots = cache.next_slots(hidden.shape[1])
        output = self.run(context.next_tokens, hidden, slots, cache, None)
        cache.commit(None, context.num_new)
        return context.last_state(output), cache

    def open_cache(self, context: Context) -> TreeCache:
        """Return the drafter's cache for a round, empty in the first one."""
        self.cache = context.drafting_cache(
            self.cache, self.num_layers, context.builder.max_drafted
        )
        return self.cache

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        """Remove the draft's uncommitted entries from the cache."""
        assert self.cache is not None
        self.cache.roll_back()


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
