"""Trees shaped by the drafter's own confidence in every round. Shapes: B batch, F frontier
nodes, K children, V draft ids.
"""

from __future__ import annotations

from torch import Tensor

from .base import Prefix, TreeBuilder, TreeTraits, check_settings
from .growing import GrowingTree
from .rollout import Rollout
from .token_tree import TokenTree


class Eagle2(TreeBuilder):
    """EAGLE-2's dynamic tree (Li et al., 2024, section 4): expand the most likely nodes, then
    verify the most likely ones.

    Each level expands its `top_k` best nodes into `top_k` children each; of everything drafted, the
    `budget` - 1 nodes with the best scores are verified.
    """

    name = "eagle2"
    traits = TreeTraits(is_fixed=True)

    def __init__(
        self,
        # Longest path below the root in draft tokens.
        depth: int = 5,
        # Nodes of the tree that the target verifies at most, the root included.
        budget: int = 16,
        # Nodes of a level that are expanded, and children of each of them.
        top_k: int = 4,
    ) -> None:
        self.depth, self.budget, self.top_k = depth, budget, top_k
        check_settings(self, depth=(depth, 1), budget=(budget, 2), top_k=(top_k, 1))
        self.max_drafted = (depth - 1) * top_k

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        tree = GrowingTree(self, prefix, rollout)
        depth = rollout.limit_depth(self.depth)
        for level in range(depth):
            self._add_level(tree)
            if level + 1 < depth:
                tree.extend_best(self.top_k)
        return tree.select_best(self.budget)

    def _add_level(self, draft: GrowingTree) -> Tensor:
        return draft.add_children(self.top_k)


def best_of_level(scores: Tensor, count: int) -> Tensor:
    """Return the best nodes of a level, [B, at most count]; ties go to the first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
