"""Traversal verification: a lossless rule that judges the nodes of a tree from the leaves to the
root.
"""

from __future__ import annotations

from typing import Any

from spectrain.decoding.acceptance.base import DRAWN_CHILDREN
from spectrain.decoding.acceptance.rejection import PathRule
from spectrain.decoding.acceptance.sequential import (
    RandomSource,
    VerifiedTree,
    iterate_siblings,
    normalize_weights,
    residual_rate,
)


class Traversal(PathRule):
    """Traversal verification (Weng et al., 2025): judge nodes from the leaves to the root, each
    with all that is below it.

    A node has a rate (the root 1) and a residual P (at first p). Each child, in the order drawn, is
    visited with rate min(1, rate P(x) / Q(x)); where it fails, the mass S of max(rate P - Q, 0)
    gives the new residual and the new rate S / (S + 1 - rate). With no child left the node is
    accepted with its rate. On a chain it is block verification.

    The likeliest children of a node are visited after the drawn one, as if each were drawn from a
    distribution with all mass on it. Where only the last level branches, the result is the optimal
    transport of a round: above it block verification is optimal for the one path, and the last
    nodes accept the optimum of a node. Where an earlier level branches, it is not.
    """

    name = "traversal"
    children = (*DRAWN_CHILDREN, "top_and_sampled")

    def select_path(self, tree: VerifiedTree, random: RandomSource) -> tuple[list[int], int]:
        accepted = self._visit_node(tree, random, 0, 1)
        assert accepted is not None, "the root is always accepted"
        return accepted

    def _visit_node(
        self, tree: VerifiedTree, random: RandomSource, node: int, rate: Any
    ) -> tuple[list[int], int] | None:
        p = tree.p(node)
        children = tree.children[node]
        siblings = (
            iterate_siblings(
                [tree.tokens[child] for child in children], tree.q(node), tree.without_replacement
            )
            if children
            else ()
        )
        for index, q in siblings:
            child = children[index]
            accepted = self._visit_node(
                tree, random, child, self.child_rate(p, q, tree.tokens[child], rate)
            )
            if accepted is not None:
                return [node, *accepted[0]], accepted[1]
            residual = (rate * p - q).clip(0)
            p = normalize_weights(residual, p)
            rate = 1 if node == 0 else residual_rate(residual.sum(), rate)
        return (
            ([node], random.draw_token(p, node))
            if node == 0 or random.flip_coin(rate, node, number=node)
            else None
        )
