"""Tries: ready continuations of a text that share their common prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

TOKEN_BITS = 32  # bits of a token id


class Trie:
    """Nodes below a text's root, parents before children, siblings with distinct tokens, none
    heavier than its parent.

    A weight orders nodes; where drafts of several sources are merged, it is the probability that
    the node is accepted.
    """

    is_calibrated = False  # whether weights are such probabilities, with 1 at the root

    def __init__(self) -> None:
        self.tokens = [-1]  # the root's token is not stored here
        self.parents = [-1]
        self.depths = [0]
        self.weights = [0.0]
        # (parent << 32 | token) -> node; tuples would burden the garbage collector
        self.child_index: dict[int, int] = {}

    @classmethod
    def from_continuations(cls, continuations: Iterable[Sequence[int]]) -> Trie:
        """Make a trie of continuations of equal weight."""
        trie = cls()
        for tokens in continuations:
            trie.add_continuation(tokens)
        return trie

    @classmethod
    def from_arrays(cls, tokens: np.ndarray, parents: np.ndarray, depths: np.ndarray) -> Trie:
        """Make a trie of arrays [N] that list its nodes, the root first; all weights are 0."""
        trie = cls()
        trie.tokens[1:], trie.parents[1:], trie.depths[1:] = (
            part[1:].tolist() for part in (tokens, parents, depths)
        )
        trie.weights = [0.0] * len(tokens)
        trie.child_index = dict(
            zip((parents << TOKEN_BITS | tokens)[1:].tolist(), range(1, len(tokens)))
        )
        return trie

    def __len__(self) -> int:
        return len(self.tokens)

    def find_child(self, parent: int, token: int) -> int | None:
        """Return the child of a node with this token, or None."""
        return self.child_index.get(parent << TOKEN_BITS | token)

    def ensure_child(self, parent: int, token: int) -> int:
        """Return the child of a node with this token; add it where it is missing."""
        node = self.find_child(parent, token)
        if node is None:
            node = self.child_index[parent << TOKEN_BITS | token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.weights.append(0.0)
        return node

    def add_continuation(self, tokens: Sequence[int], weight: float = 1.0) -> list[int]:
        """Add a continuation, increase the weights of its nodes and return them."""
        nodes = []
        node = 0
        self.weights[0] += weight
        for token in tokens:
            node = self.ensure_child(node, token)
            self.weights[node] += weight
            nodes.append(node)
        return nodes

    def best_nodes(self, depth: int, budget: int) -> list[int]:
        """Return the `budget` heaviest nodes down to a depth, the root included, in ascending
        order; ties go to the first.
        """
        return sorted(self.rank_nodes(depth, budget))

    def rank_nodes(self, depth: int, budget: int) -> list[int]:
        """Return the same nodes, the heaviest first."""
        deep = [node for node, at in enumerate(self.depths) if at <= depth]
        return sorted(deep, key=self.weights.__getitem__, reverse=True)[:budget]

    def heaviest_path(self, depth: int) -> list[int]:
        """Return the path from the root that always takes the heaviest child."""
        heaviest: dict[int, int] = {}
        for node in range(1, len(self.tokens)):
            if self.weights[node] > self.weights[heaviest.setdefault(self.parents[node], node)]:
                heaviest[self.parents[node]] = node
        nodes = [0]
        while len(nodes) <= depth and nodes[-1] in heaviest:
            nodes.append(heaviest[nodes[-1]])
        return nodes
