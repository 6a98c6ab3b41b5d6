"""Ready continuations of a text, merged where they begin alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Trie:
    """Nodes below a text's root, parents before children, siblings with distinct tokens, and none heavier than its parent.

    A weight is whatever orders nodes; where drafts of several sources meet, it is the chance that the node is kept.
    """

    def __init__(self) -> None:
        self.tokens = [-1]  # the root's own is not known here
        self.parents = [-1]
        self.depths = [0]
        self.weights = [0.0]
        self.children: list[dict[int, int]] = [{}]  # of every node: token -> node

    @classmethod
    def of(cls, continuations: Iterable[Sequence[int]]) -> Trie:
        """Continuations that weigh the same."""
        trie = cls()
        for tokens in continuations:
            trie.add(tokens)
        return trie

    def __len__(self) -> int:
        return len(self.tokens)

    def node(self, parent: int, token: int) -> int:
        """The child of a node with this token, made if it is not there."""
        found = self.children[parent].get(token)
        if found is None:
            found = self.children[parent][token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.weights.append(0.0)
            self.children.append({})
        return found

    def add(self, tokens: Sequence[int], weight: float = 1.0) -> list[int]:
        """Add a continuation, whose weight comes on top of what its nodes weigh; its nodes."""
        nodes = []
        node = 0
        self.weights[0] += weight
        for token in tokens:
            node = self.node(node, token)
            self.weights[node] += weight
            nodes.append(node)
        return nodes

    def best(self, depth: int, budget: int) -> list[int]:
        """The `budget` heaviest nodes, the root one of them, down to a depth, in their order; among equals the first ones."""
        deep = (node for node in range(1, len(self.tokens)) if self.depths[node] <= depth)
        return [0, *sorted(sorted(deep, key=lambda node: (-self.weights[node], node))[: budget - 1])]

    def path(self, depth: int) -> list[int]:
        """From the root down, always the heaviest child."""
        nodes = [0]
        while len(nodes) <= depth and (children := self.children[nodes[-1]]):
            nodes.append(max(children.values(), key=lambda node: (self.weights[node], -node)))
        return nodes
