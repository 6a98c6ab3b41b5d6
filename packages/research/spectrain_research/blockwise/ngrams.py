"""Counts of n-grams with backoff, and the best paths of a lattice under them. Shapes: N n-grams,
D depths, M tokens a depth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import nlargest

import numpy as np

from spectrain.errors import UserError

BACKOFF = 0.4  # factor of a shorter context (Brants et al., 2007)
TOKEN_BITS = 21  # bits of a token in a packed n-gram
MAX_ORDER = 3


class NgramModel:
    """S(x | context) = count(context x) / count(context) where that occurs, else 0.4 S(x | shorter
    context).

    This is stupid backoff (Brants et al., 2007, section 4); a single token has the smoothed (count
    + 1) / (N + V).
    """

    def __init__(self, tokens: np.ndarray, order: int, vocab_size: int) -> None:
        if vocab_size >= 1 << TOKEN_BITS:
            raise UserError(
                f"drafter.order: n-grams of a vocabulary of {vocab_size} tokens cannot be packed"
            )
        self.order, self.vocab_size = order, vocab_size
        self.counts: list[dict[int, int]] = []
        for length in range(1, order + 1):
            grams = (
                np.lib.stride_tricks.sliding_window_view(tokens.astype(np.int64), length)
                if len(tokens) >= length
                else None
            )
            inside = (
                np.zeros((0, length), np.int64)
                if grams is None
                else grams[(grams >= 0).all(axis=1)]
            )
            packed = np.zeros(len(inside), np.int64)
            for column in inside.T:
                packed = packed << TOKEN_BITS | column
            self.counts.append(
                dict(zip(*(part.tolist() for part in np.unique(packed, return_counts=True))))
            )
        self.total = sum(self.counts[0].values())
        self.scores: dict[int, float] = {}

    def log_score(self, context: Sequence[int], token: int) -> float:
        """Return log S of a token after a context, of which the last `order` - 1 tokens count."""
        context = tuple(context)[max(0, len(context) - self.order + 1) :]
        packed = pack_tokens((*context, token))
        key = packed << 2 | len(context)
        if key not in self.scores:
            self.scores[key] = self._compute_score(context, token, packed)
        return self.scores[key]

    def _compute_score(self, context: tuple[int, ...], token: int, packed: int) -> float:
        if not context:
            return math.log((self.counts[0].get(token, 0) + 1) / (self.total + self.vocab_size))
        count = self.counts[len(context)].get(packed, 0)
        if count:
            return math.log(count / self.counts[len(context) - 1][pack_tokens(context)])
        return math.log(BACKOFF) + self.log_score(context[1:], token)


def pack_tokens(tokens: Sequence[int]) -> int:
    """Return the tokens as one number."""
    packed = 0
    for token in tokens:
        packed = packed << TOKEN_BITS | token
    return packed


def find_best_paths(
    lattice: Sequence[Sequence[tuple[int, float]]],
    context: Sequence[int],
    model: NgramModel,
    weight: float,
    count: int,
) -> list[tuple[float, tuple[int, ...]]]:
    """Return the `count` best paths through a lattice of tokens with their log q, the best first,
    each with its score.

    The score of a path is sum_d log q_d(x_d) + weight log S(x_d | the tokens before). This is
    Viterbi's search with the `count` best paths of every state, and a state is all that the n-gram
    model reads, so the result is exact.
    """
    reach = max(0, model.order - 1)
    states: dict[tuple[int, ...], list[tuple[float, tuple[int, ...]]]] = {
        tuple(context)[len(context) - reach :]: [(0.0, ())]
    }
    for options in lattice:
        grown: dict[tuple[int, ...], list[tuple[float, tuple[int, ...]]]] = {}
        for state, paths in states.items():
            for token, log_q in options:
                step = log_q + weight * model.log_score(state, token)
                after = (*state, token)[len(state) + 1 - reach :]
                grown.setdefault(after, []).extend(
                    (score + step, (*path, token)) for score, path in paths
                )
        states = {state: nlargest(count, paths) for state, paths in grown.items()}
    return nlargest(count, [path for paths in states.values() for path in paths])
