"""Trees of ready continuations, and what a drafter adds to them. Shapes: B batch, D depth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spectrain.copying.trie import Trie

from .base import RoundResult
from .measurements import Latency

# Acceptance probability of the heaviest copy before any was judged, and the number of texts that it
# counts for.
FIRST_RATE = 0.5
PRIOR_TEXTS = 8


def are_calibrated(tries: list[Trie]) -> bool:
    """Tell whether the weights of all tries are acceptance probabilities."""
    return bool(tries) and all(trie.is_calibrated for trie in tries)


def chances_by_depth(
    tries: list[Trie], nodes: list[list[int]], depth: int, budget: int
) -> np.ndarray:
    """Return the acceptance probability of each text's nodes, in their order, at the node's
    depth: [B, depth + 1, budget].
    """
    chances = np.zeros((len(tries), depth + 1, budget))
    for text_chances, trie, chosen in zip(chances, tries, nodes):
        text_chances[[trie.depths[node] for node in chosen], range(len(chosen))] = [
            trie.weights[node] for node in chosen
        ]
    return chances


@dataclass(frozen=True)
class CopyTree:
    """The fastest tree of ready continuations."""

    size: int  # nodes, the root included
    num_tokens: float  # expected tokens of a round
    seconds: float  # time to verify the tree
    expected_by_depth: np.ndarray  # [B, 1 + D] expected accepted nodes, by depth
    tries: list[Trie]
    nodes: list[set[int]]  # selected nodes of each trie

    @property
    def gain_bucket(self) -> int:
        """The bucket of expected tokens by which gains are averaged; at most 6, because more
        buckets have fewer rounds each.
        """
        return min(6, round(2 * self.num_tokens))

    @classmethod
    def find_fastest(
        cls, tries: list[Trie], depth: int, seconds: list[float], spent: float, latency: Latency
    ) -> CopyTree:
        """Return the tree with most tokens per second after `spent` seconds, if a tree of n
        nodes takes seconds[n - 1].
        """
        budget = len(seconds)
        nodes = [trie.rank_nodes(depth, budget) for trie in tries]
        chances = chances_by_depth(tries, nodes, depth, budget)
        tokens = chances.sum(1).mean(0).cumsum()
        times = np.asarray(seconds)
        if latency.level_seconds:
            levels = np.arange(chances.shape[1])[:, None] * (chances.sum(0) > 0)
            times = times + [
                latency.estimate_levels(int(level))
                for level in np.maximum.accumulate(levels.max(0))
            ]
        size = int((tokens / (spent + times)).argmax()) + 1
        expected = chances[:, :, :size].sum(2)
        selected = [set(chosen[:size]) for chosen in nodes]
        return cls(size, float(tokens[size - 1]), float(times[size - 1]), expected, tries, selected)

    def drafter_gain(self, outcome: RoundResult) -> float:
        """Return how many more tokens per text a round with drafted nodes accepted than these
        copies alone would have.
        """
        assert outcome.path is not None
        paths = outcome.tree.tokens.gather(1, outcome.path).tolist()
        accepted = [path[1:count] for path, count in zip(paths, outcome.counts.tolist())]
        return sum(
            len(tokens) - self._matched_length(row, tokens) for row, tokens in enumerate(accepted)
        ) / len(accepted)

    def _matched_length(self, row: int, tokens: list[int]) -> int:
        """Return how many of the tokens after a text's root follow a path of these nodes."""
        node: int | None = 0
        for length, token in enumerate(tokens):
            node = None if node is None else self.tries[row].find_child(node, token)
            if node not in self.nodes[row]:
                return length
        return len(tokens)


class CopyRanks:
    """Learned acceptance of copies whose weights are no probabilities, by the rank of a node's
    weight in its text.

    The rate of a rank is the share of texts whose node of this rank was accepted; a text without
    such a node counts as one whose node was not. It is a running mean over the last texts in which
    the rank was verified.
    """

    def __init__(self, budget: int, memory: int) -> None:
        self.memory = memory
        # of ranks 1 to budget - 1; the root has rank 0
        self.rates = FIRST_RATE / np.arange(1, budget)
        self.num_texts = np.full(budget - 1, PRIOR_TEXTS)
        self.ranked: list[list[int]] | None = None  # of this round's texts, the nodes by weight
        self.size = 0

    def choose_size(self, tries: list[Trie], depth: int, seconds: list[float], spent: float) -> int:
        """Return the size of 2 or more with most tokens per second after `spent` seconds, if n
        nodes take seconds[n - 1].
        """
        self.ranked = [trie.rank_nodes(depth, len(seconds)) for trie in tries]
        widest = max(map(len, self.ranked))
        tokens = 1 + self.rates.cumsum()[: widest - 1]
        self.size = (
            int((tokens / (spent + np.asarray(seconds[1:widest]))).argmax()) + 2
            if widest > 1
            else 1
        )
        return self.size

    def expected_round(self, seconds: list[float], spent: float) -> tuple[float, float]:
        """Return the expected tokens and the cost, in plain steps, of the round with copies that
        gains most.
        """
        tokens = 1 + self.rates.cumsum()
        costs = (spent + np.asarray(seconds[1:])) / seconds[0]
        best = int(np.argmax(tokens - costs))
        return float(tokens[best]), float(costs[best])

    def observe(self, outcome: RoundResult) -> None:
        """Learn from a round with the last chosen size."""
        ranked = self.ranked
        self.ranked = None
        if ranked is None or outcome.path is None or self.size < 2:
            return
        for nodes, path, count in zip(ranked, outcome.path.tolist(), outcome.counts.tolist()):
            if count:
                tree = sorted(nodes[: self.size])
                accepted = {tree[node] for node in path[1:count] if node < len(tree)}
                hits = np.array([float(node in accepted) for node in nodes[1 : self.size]])
                hits = np.append(hits, np.zeros(self.size - 1 - len(hits)))
                self.num_texts[: self.size - 1] = np.minimum(
                    self.num_texts[: self.size - 1] + 1, self.memory
                )
                self.rates[: self.size - 1] += (
                    hits - self.rates[: self.size - 1]
                ) / self.num_texts[: self.size - 1]
