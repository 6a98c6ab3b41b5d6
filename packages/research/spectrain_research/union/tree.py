"""Trees of several drafters, merged by path. Shapes: B batch, N nodes, V target vocabulary, K
drafters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spectrain.trees.token_tree import TokenTree


@dataclass(frozen=True)
class UnionTree(TokenTree):
    """A merged tree of sampled children. A node that two drafters drew has two draws, and each
    drafter has its own q.
    """

    # of each row, by node: (child, drafter) in the order of draws
    draws: tuple[dict[int, list[tuple[int, int]]], ...] = ()
    # K times [B, N, V], the distribution of a drafter's draws after each node
    drafter_q: tuple[Tensor, ...] = ()


@dataclass
class MergedRow:
    """The merged tree of one text."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    children: dict[tuple[int, int], int] = field(default_factory=dict)  # (node, token) -> child
    # node -> (child, drafter)
    draws: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    # of each drafter's tree, the merged node of each node, or -1
    node_maps: list[list[int]] = field(default_factory=list)

    def add_tree(self, tree: TokenTree, row: int) -> None:
        """Add the tree of the next drafter."""
        drafter = len(self.node_maps)
        node_map = [0]
        real = (tree.valid[row] & tree.can_emit[row]).tolist()
        for token, parent, is_real in list(
            zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), real)
        )[1:]:
            if not is_real or node_map[parent] < 0:
                node_map.append(-1)
                continue
            parent = node_map[parent]
            if (parent, token) not in self.children:
                self.children[parent, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(parent)
            node_map.append(self.children[parent, token])
            self.draws.setdefault(parent, []).append((node_map[-1], drafter))
        self.node_maps.append(node_map)


def merge_trees(trees: Sequence[TokenTree], vocab_size: int) -> TokenTree:
    """Merge trees of the same roots by path; those of sampled children keep all draws and the q
    of every drafter.
    """
    device = trees[0].tokens.device
    rows = [MergedRow([int(root)]) for root in trees[0].tokens[:, 0]]
    for tree in trees:
        for number, row in enumerate(rows):
            row.add_tree(tree, number)
    width = max(len(row.tokens) for row in rows)

    def pad_rows(values: list[list[int]]) -> Tensor:
        return torch.tensor([[*part, *[0] * (width - len(part))] for part in values], device=device)

    tokens = pad_rows([row.tokens for row in rows])
    parents = pad_rows([row.parents for row in rows])
    valid = pad_rows([[1] * len(row.tokens) for row in rows]).bool()
    if all(tree.children == "deterministic" for tree in trees):
        return TokenTree.from_parents(tokens, parents, valid)
    q = tuple(
        _gather_q(tree, [row.node_maps[number] for row in rows], width, vocab_size)
        for number, tree in enumerate(trees)
    )
    draws = tuple(row.draws for row in rows)
    every = torch.ones_like(valid)
    return UnionTree(tokens, parents, valid, every, "sampled", q[0], draws=draws, drafter_q=q)


def _gather_q(tree: TokenTree, node_maps: list[list[int]], width: int, vocab_size: int) -> Tensor:
    """Return a drafter's q [B, width, V] over target ids at the merged nodes; zeros where it
    drew nothing.
    """
    assert tree.q is not None
    q = tree.q.new_zeros(len(node_maps), width, vocab_size)
    for row, node_map in enumerate(node_maps):
        for node, merged in enumerate(node_map):
            if merged >= 0 and tree.q[row, node].any():
                ids = slice(tree.q.shape[2]) if tree.draft_ids is None else tree.draft_ids
                q[row, merged, ids] = tree.q[row, node]
    return q
