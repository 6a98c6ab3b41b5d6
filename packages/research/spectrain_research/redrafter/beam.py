"""ReDrafter's beam search as a tree builder. Shapes: B batch, W beams."""

from __future__ import annotations

import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.trees.base import Prefix
from spectrain.trees.dynamic import Eagle2, best_of_level
from spectrain.trees.growing import NEG_INF, GrowingTree
from spectrain.trees.rollout import Rollout
from spectrain.trees.token_tree import TokenTree


class Beam(Eagle2):
    """ReDrafter's beam search (Zhang et al., 2024, section 3): of every length the `top_k`
    likeliest paths go on, and the last of them are verified, merged where they begin alike.

    It grows as EAGLE-2's tree does and differs in what stays: whole beams, the best first, as many
    as `budget` nodes hold once they are merged. A node that no last beam goes through is not
    verified, however likely it is by itself.
    """

    name = "beam"

    def __init__(
        self,
        # Length of a beam in draft tokens.
        depth: int = 4,
        # Nodes of the tree that the target verifies at most, the root included.
        budget: int = 16,
        # Beams of every length that are continued.
        top_k: int = 4,
    ) -> None:
        super().__init__(depth, budget, top_k)
        if budget <= depth:
            raise UserError(
                f"tree.budget={budget}: one beam of tree.depth={depth} takes {depth + 1} nodes; "
                "use as many or more"
            )

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        tree = GrowingTree(self, prefix, rollout)
        depth = rollout.limit_depth(self.depth)
        beams = best_of_level(self._add_level(tree), self.top_k)
        for _ in range(depth - 1):
            tree.extend_frontier(beams)
            beams = best_of_level(self._add_level(tree), self.top_k)
        selected = self._select_beams(tree.parents, tree.level_start + beams, depth)
        tree.scores = tree.scores.masked_fill(~selected, NEG_INF)
        return tree.select_best(self.budget)

    def _select_beams(self, parents: Tensor, ends: Tensor, depth: int) -> Tensor:
        """Mark the root and the beams, best first, that end in `ends` [B, W] and fit the budget:
        [B, nodes] bool.
        """
        path = [ends]
        for _ in range(depth - 1):
            path.append(parents.gather(1, path[-1]))
        nodes = torch.stack(path, dim=-1)  # [B, W, depth] of every beam
        width = nodes.shape[1]
        better = torch.ones(width, width, dtype=torch.bool, device=nodes.device).tril(-1)
        # with a better beam
        shared = ((nodes[:, :, None] == nodes[:, None]) & better[..., None]).any(2)
        fits = (~shared).sum(-1).cumsum(1) < self.budget  # the root takes one slot
        selected = torch.zeros_like(parents)
        selected.scatter_reduce_(
            1, nodes.flatten(1), fits[..., None].expand_as(nodes).flatten(1).long(), "amax"
        )
        selected[:, 0] = 1
        return selected.bool()
