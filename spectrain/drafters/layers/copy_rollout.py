"""Ready continuations, told step by step, as other drafters say what follows. Shapes: B batch, F nodes, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from spectrain.drafters.context import Context
from spectrain.trees.base import Draft, Rollout
from spectrain.trees.trie import Trie


class CopyRollout(Rollout):
    """q after a node is the share that each child has of what the node's continuations weigh; where nothing is known it is
    uniform, and `closed` says so. Below a path that no continuation goes along, the text is looked up anew where it can be.

    Being asked for q like any drafter, copies may be drawn from it and judged by rules that weigh p against q.
    """

    def __init__(self, draft: Draft, context: Context) -> None:
        self.draft, self.vocab_size, self.device = draft, context.target.head.vocab_size, context.tokens.device
        self.paths: list[list[list[int]]] = [[[]] for _ in context.counts]  # of every row, the path to each node given
        tries = draft.continuations or [Trie() for _ in context.counts]
        self.trie_nodes: list[list[tuple[Trie, int] | None]] = [[(trie, 0)] for trie in tries]
        self.trie_children: dict[int, dict[int, list[int]]] = {}  # of every trie asked: its nodes' children

    def start(self) -> Tensor:
        return self._log_q_after([[0]] * len(self.paths))

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        nodes = []
        for row, (new, above) in enumerate(zip(tokens.tolist(), parents.tolist())):
            first = len(self.paths[row])
            for token, parent in zip(new, above):
                self.paths[row].append([*self.paths[row][parent], token])
                self.trie_nodes[row].append(self._find_child(row, self.trie_nodes[row][parent], token))
            nodes.append(list(range(first, len(self.paths[row]))))
        return self._log_q_after(nodes)

    def _find_child(self, row: int, place: tuple[Trie, int] | None, token: int) -> tuple[Trie, int] | None:
        """Where a child of a node stands in what is known."""
        if place is not None:
            trie, node = place
            child = trie.find_child(node, token)
            if child is not None and self._index_children(trie).get(child):
                return trie, child
        if self.draft.copies_after is None:
            return None
        found = self.draft.copies_after(row, self.paths[row][-1])
        return (found, 0) if len(found) > 1 else None

    def _index_children(self, trie: Trie) -> dict[int, list[int]]:
        if id(trie) not in self.trie_children:
            found: dict[int, list[int]] = {}
            for node, parent in enumerate(trie.parents[1:], 1):
                found.setdefault(parent, []).append(node)
            self.trie_children[id(trie)] = found
        return self.trie_children[id(trie)]

    def _log_q_after(self, nodes: list[list[int]]) -> Tensor:
        """Log q [B, F, V] after nodes that were given."""
        log_q = torch.full((len(nodes), len(nodes[0]), self.vocab_size), float("-inf"))
        closed = torch.zeros(log_q.shape[:2], dtype=torch.bool)
        for row, asked in enumerate(nodes):
            for at, node in enumerate(asked):
                place = self.trie_nodes[row][node]
                below = [] if place is None else self._index_children(place[0]).get(place[1], [])
                if place is None or not below:
                    closed[row, at], log_q[row, at] = True, 0.0
                    continue
                weights = torch.tensor([place[0].weights[child] for child in below]).clamp(min=1e-6)
                log_q[row, at, [place[0].tokens[child] for child in below]] = weights.log()
        self.stop_mask = closed.to(self.device)
        return log_q.log_softmax(-1).to(self.device)


def as_rollout(draft: Draft, context: Context) -> Rollout:
    """What a drafter hands over, as a rollout."""
    return CopyRollout(draft, context) if draft.rollout is None else draft.rollout
