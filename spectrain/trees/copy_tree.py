"""Trees of ready continuations, and what a drafter adds to them. Shapes: B batch, D depth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from .base import RoundResult
from .trie import Trie


def are_calibrated(tries: list[Trie]) -> bool:
    """Tell whether the weights of all tries are acceptance probabilities."""
    return bool(tries) and all(trie.is_calibrated for trie in tries)


def chances_by_depth(tries: list[Trie], nodes: list[list[int]], depth: int, budget: int) -> np.ndarray:
    """Return the acceptance probability of each text's nodes, in their order, at the node's depth: [B, depth + 1, budget]."""
    chances = np.zeros((len(tries), depth + 1, budget))
    for text_chances, trie, chosen in zip(chances, tries, nodes):
        text_chances[[trie.depths[node] for node in chosen], range(len(chosen))] = [trie.weights[node] for node in chosen]
    return chances


@dataclass(frozen=True)
class CopyTree:
    """The fastest tree of ready continuations."""

    size: int  # nodes, the root included
    num_tokens: float  # expected tokens of a round
    seconds: float  # time to verify the tree
    expected_by_depth: Tensor  # [B, 1 + D] expected accepted nodes, by depth
    tries: list[Trie]
    nodes: list[set[int]]  # selected nodes of each trie

    @property
    def gain_bucket(self) -> int:
        """The bucket of expected tokens by which gains are averaged; at most 6, because more buckets have fewer rounds each."""
        return min(6, round(2 * self.num_tokens))

    def drafter_gain(self, outcome: RoundResult) -> float:
        """Return how many more tokens per text a round with drafted nodes accepted than these copies alone would have."""
        assert outcome.path is not None
        paths = outcome.tree.tokens.gather(1, outcome.path).tolist()
        accepted = [path[1:count] for path, count in zip(paths, outcome.counts.tolist())]
        return sum(len(tokens) - self._matched_length(row, tokens) for row, tokens in enumerate(accepted)) / len(accepted)

    def _matched_length(self, row: int, tokens: list[int]) -> int:
        """Return how many of the tokens after a text's root follow a path of these nodes."""
        node: int | None = 0
        for length, token in enumerate(tokens):
            node = None if node is None else self.tries[row].find_child(node, token)
            if node not in self.nodes[row]:
                return length
        return len(tokens)
