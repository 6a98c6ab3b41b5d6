"""A rollout over ready continuations. Shapes: B batch, F nodes, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from spectrain.copying.trie import Trie
from spectrain.drafters.context import Context
from spectrain.trees.rollout import Draft, Rollout


class CopyRollout(Rollout):
    """Drafts from weighted continuations: q of a child is its share of the weights of all children.

    A node without continuations has a uniform q and is marked in `stop_mask`. Where the draft can
    look up paths, a path that no continuation contains is looked up in the text. As copies have a
    q, rules that compare p with q accept them too.
    """

    def __init__(self, draft: Draft, context: Context) -> None:
        self.draft, self.vocab_size, self.device = (
            draft,
            context.target.head.vocab_size,
            context.tokens.device,
        )
        # per row, the path to each node
        self.paths: list[list[list[int]]] = [[[]] for _ in context.num_new]
        tries = draft.continuations or [Trie() for _ in context.num_new]
        self.trie_nodes: list[list[tuple[Trie, int] | None]] = [[(trie, 0)] for trie in tries]
        self.trie_children: dict[int, dict[int, list[int]]] = {}  # id of a trie -> node -> children

    def start(self) -> Tensor:
        return self._log_q_after([[0]] * len(self.paths))

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        nodes = []
        for row, (row_tokens, row_parents) in enumerate(zip(tokens.tolist(), parents.tolist())):
            first = len(self.paths[row])
            for token, parent in zip(row_tokens, row_parents):
                self.paths[row].append([*self.paths[row][parent], token])
                self.trie_nodes[row].append(
                    self._find_child(row, self.trie_nodes[row][parent], token)
                )
            nodes.append(list(range(first, len(self.paths[row]))))
        return self._log_q_after(nodes)

    def _find_child(
        self, row: int, trie_node: tuple[Trie, int] | None, token: int
    ) -> tuple[Trie, int] | None:
        """Return the trie and the node in it of a new child, or None if it has no continuations."""
        if trie_node is not None:
            trie, node = trie_node
            child = trie.find_child(node, token)
            if child is not None and self._index_children(trie).get(child):
                return trie, child
        if self.draft.copies_after is None:
            return None
        matches = self.draft.copies_after(row, self.paths[row][-1])
        return (matches, 0) if len(matches) > 1 else None

    def _index_children(self, trie: Trie) -> dict[int, list[int]]:
        if id(trie) not in self.trie_children:
            children: dict[int, list[int]] = {}
            for node, parent in enumerate(trie.parents[1:], 1):
                children.setdefault(parent, []).append(node)
            self.trie_children[id(trie)] = children
        return self.trie_children[id(trie)]

    def _log_q_after(self, nodes: list[list[int]]) -> Tensor:
        """Return log q [B, F, V] after nodes."""
        log_q = torch.full((len(nodes), len(nodes[0]), self.vocab_size), float("-inf"))
        closed = torch.zeros(log_q.shape[:2], dtype=torch.bool)
        for row, row_nodes in enumerate(nodes):
            for index, node in enumerate(row_nodes):
                trie_node = self.trie_nodes[row][node]
                children = (
                    []
                    if trie_node is None
                    else self._index_children(trie_node[0]).get(trie_node[1], [])
                )
                if trie_node is None or not children:
                    closed[row, index], log_q[row, index] = True, 0.0
                    continue
                weights = torch.tensor([trie_node[0].weights[child] for child in children]).clamp(
                    min=1e-6
                )
                log_q[row, index, [trie_node[0].tokens[child] for child in children]] = (
                    weights.log()
                )
        self.stop_mask = closed.to(self.device)
        return log_q.log_softmax(-1).to(self.device)


def as_rollout(draft: Draft, context: Context) -> Rollout:
    """Return a draft's rollout, or one over its continuations."""
    return CopyRollout(draft, context) if draft.rollout is None else draft.rollout
