"""Pruned drafts whose places copies take (Graft, Liu et al., 2026, arXiv 2605.20104).

Shapes: B batch, N nodes.
"""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf, log
from typing import Any

from spectrain.config.values import Count, Share
from spectrain.copying.trie import Trie
from spectrain.drafters.hybrid import Hybrid
from spectrain.models.target import Target
from spectrain.trees.token_tree import TokenTree


class Graft(Hybrid):
    """Drops drafted nodes of unlikely paths, and fills exactly their places with copies.

    drafter=hybrid lets nodes and copies compete for all places by their chances. Here every drafted
    node stays whose path has at least the probability `prune`, and copies take what is left of the
    builder's budget, the likeliest first. A tree keeps its number of nodes, as far as there are
    copies. tree=opt also drafts fewer levels where another one promises too little.
    """

    def __init__(
        self,
        target: Target,
        # Drafter to combine with copies: a run folder, a drafter directory, or a choice, alone or
        # with settings.
        inner: str | dict[str, Any] = "eagle3",
        # Folder that spectrain data index wrote, to copy from; null copies from the current text
        # only.
        store: str | None = None,
        # Largest number of final tokens of the text that are matched in the text itself.
        longest: Count = 6,
        # Largest number of matching positions that are read per source.
        matches: Count = 200,
        # Number of matches in the store below which shorter endings of the text are matched too.
        enough: Count = 64,
        # Probability of a drafted path below which its last node is dropped.
        prune: Share = 0.05,
    ) -> None:
        super().__init__(target, inner, store, longest, matches, enough)
        self.prune = prune

    def _merge_tries(self, tree: TokenTree) -> list[Trie]:
        """Return the tries of every text, with the drafter's nodes [B, N] that stay added, which
        weigh more than all copies.
        """
        assert tree.scores is not None
        least = log(self.prune) if self.prune else -inf
        stays = tree.valid & (tree.scores >= least)
        tries = super()._merge_tries(replace(tree, valid=stays))
        nodes = (tree.tokens, tree.parents, tree.scores, stays)
        for trie, *row in zip(tries, *(part.tolist() for part in nodes)):
            put_first(trie, *row)
        return tries


def put_first(
    trie: Trie, tokens: list[int], parents: list[int], scores: list[float], stays: list[bool]
) -> None:
    """Let a trie's nodes that a drafter proposed weigh more than 1, so that they come before all
    copies; `scores` are the log-probabilities of the paths to them.
    """
    node_ids = {0: 0}
    trie.weights[0] = 2.0
    trie.is_calibrated = False
    for node in range(1, len(tokens)):
        if stays[node]:
            found = trie.find_child(node_ids[parents[node]], tokens[node])
            assert found is not None, "the drafter's nodes were added"
            node_ids[node] = found
            trie.weights[found] = 1 + exp(min(0.0, scores[node]))
