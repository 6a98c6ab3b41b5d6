"""Ready continuations of a text, merged where they begin alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

TOKEN_BITS = 32  # of a token


class Trie:
    """Nodes below a text's root, parents before children, siblings with distinct tokens, and none heavier than its parent.

    A weight is whatever orders nodes; where drafts of several sources meet, it is the chance that the node is kept.
    """

    is_calibrated = False  # whether weights are such chances, the root's 1

    def __init__(self) -> None:
        self.tokens = [-1]  # the root's own is not known here
        self.parents = [-1]
        self.depths = [0]
        self.weights = [0.0]
        self.child_index: dict[int, int] = {}  # parent and token, as one number -> node: pairs keep the garbage collector busy

    @classmethod
    def from_continuations(cls, continuations: Iterable[Sequence[int]]) -> Trie:
        """Continuations that weigh the same."""
        trie = cls()
        for tokens in continuations:
            trie.add_continuation(tokens)
        return trie

    @classmethod
    def from_arrays(cls, tokens: np.ndarray, parents: np.ndarray, depths: np.ndarray) -> Trie:
        """Nodes [N] that are a trie already, the root first, of which only the place counts; weights are still to come."""
        trie = cls()
        trie.tokens[1:], trie.parents[1:], trie.depths[1:] = (part[1:].tolist() for part in (tokens, parents, depths))
        trie.weights = [0.0] * len(tokens)
        trie.child_index = dict(zip((parents << TOKEN_BITS | tokens)[1:].tolist(), range(1, len(tokens))))
        return trie

    def __len__(self) -> int:
        return len(self.tokens)

    def find_child(self, parent: int, token: int) -> int | None:
        """The child of a node with this token, if there is one."""
        return self.child_index.get(parent << TOKEN_BITS | token)

    def ensure_child(self, parent: int, token: int) -> int:
        """The child of a node with this token, made if it is not there."""
        found = self.find_child(parent, token)
        if found is None:
            found = self.child_index[parent << TOKEN_BITS | token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.weights.append(0.0)
        return found

    def add_continuation(self, tokens: Sequence[int], weight: float = 1.0) -> list[int]:
        """Add a continuation, whose weight comes on top of what its nodes weigh; its nodes."""
        nodes = []
        node = 0
        self.weights[0] += weight
        for token in tokens:
            node = self.ensure_child(node, token)
            self.weights[node] += weight
            nodes.append(node)
        return nodes

    def best_nodes(self, depth: int, budget: int) -> list[int]:
        """The `budget` heaviest nodes, the root one of them, down to a depth, in their order; among equals the first ones."""
        return sorted(self.rank_nodes(depth, budget))

    def rank_nodes(self, depth: int, budget: int) -> list[int]:
        """The same, the heaviest first."""
        deep = [node for node, at in enumerate(self.depths) if at <= depth]
        return sorted(deep, key=self.weights.__getitem__, reverse=True)[:budget]

    def heaviest_path(self, depth: int) -> list[int]:
        """From the root down, always the heaviest child."""
        heaviest: dict[int, int] = {}
        for node in range(1, len(self.tokens)):
            if self.weights[node] > self.weights[heaviest.setdefault(self.parents[node], node)]:
                heaviest[self.parents[node]] = node
        nodes = [0]
        while len(nodes) <= depth and nodes[-1] in heaviest:
            nodes.append(heaviest[nodes[-1]])
        return nodes
