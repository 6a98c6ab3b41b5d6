"""OPT-Tree: the tree of a budget with the largest expected length, by the drafter's own
probabilities. Shapes: B batch.
"""

from __future__ import annotations

import torch

from spectrain.trees.base import Prefix, TreeBuilder, check_settings
from spectrain.trees.growing import NEG_INF, GrowingTree
from spectrain.trees.rollout import Rollout
from spectrain.trees.token_tree import TokenTree


class OptTree(TreeBuilder):
    """OPT-Tree (Wang et al., 2024): the tree of `budget` nodes with the largest sum of path
    probabilities, its expected length.

    Such a tree is the nodes with the largest ones, so only the newest level's members of it are
    drafted on. Drafting stops where a level adds at most `threshold` expected tokens, which a draft
    step should cost in steps of the target.
    """

    name = "opt"

    def __init__(
        self,
        # Longest path below the root in draft tokens.
        depth: int = 8,
        # Nodes of the tree that the target verifies at most, the root included.
        budget: int = 16,
        # Drafting stops where a level adds at most so many expected tokens.
        threshold: float = 0.1,
    ) -> None:
        self.depth, self.budget, self.threshold = depth, budget, threshold
        check_settings(self, depth=(depth, 1), budget=(budget, 2), threshold=(threshold, 0))
        self.max_drafted = (depth - 1) * (budget - 1)

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        tree = GrowingTree(self, prefix, rollout)
        expected = torch.ones(len(prefix.root), device=prefix.root.device)
        is_open = torch.ones_like(expected, dtype=torch.bool)
        depth = rollout.limit_depth(self.depth)
        for level in range(depth):
            tree.add_children(self.budget - 1, is_open[:, None, None] if level else None)
            best = tree.scores.topk(min(self.budget, tree.scores.shape[1]), dim=1)
            gained = best.values.exp().sum(1) - expected
            expected = expected + gained
            is_open = is_open & (gained > self.threshold)
            newest = (best.indices >= tree.level_start) & (best.values > NEG_INF)
            width = int((newest & is_open[:, None]).sum(1).max())
            if level + 1 == depth or width == 0:
                break
            tree.extend_best(width)
        return tree.select_best(self.budget)
