"""Dynamic time warping of two encodings of one text (TokenTiming, 2025). Shapes: K tokens of the
first, M of the second.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def uncovered_bytes(sizes: Sequence[int], others: Sequence[int]) -> np.ndarray:
    """Return the number of bytes [K, M] that only one of two tokens covers, from the token sizes
    in bytes of both encodings.
    """
    ends = np.cumsum(sizes)
    other_ends = np.cumsum(others)
    starts = ends - sizes
    other_starts = other_ends - others
    both = np.minimum(ends[:, None], other_ends) - np.maximum(starts[:, None], other_starts)
    total: np.ndarray = np.asarray(sizes)[:, None] + np.asarray(others) - 2 * both.clip(min=0)
    return total


def align_tokens(costs: np.ndarray) -> list[tuple[int, int]]:
    """Return the pairs on the cheapest path from the first pair to the last one (Sakoe and Chiba,
    1978).

    Each step advances in one encoding or in both. Of paths with equal costs, one with fewer pairs
    is returned.
    """
    total = np.full((costs.shape[0] + 1, costs.shape[1] + 1), np.inf)
    total[0, 0] = 0
    for i, row in enumerate(costs.tolist()):
        for j, cost in enumerate(row):
            total[i + 1, j + 1] = cost + min(total[i, j], total[i, j + 1], total[i + 1, j])
    i, j = costs.shape
    pairs = []
    while i and j:
        pairs.append((i - 1, j - 1))
        i, j = min(((i - 1, j - 1), (i - 1, j), (i, j - 1)), key=lambda pair: total[pair])
    return pairs[::-1]


def carry_probabilities(
    probabilities: Sequence[float], pairs: Sequence[tuple[int, int]], count: int
) -> list[float]:
    """Carry the probabilities [K] of one encoding's tokens over to the `count` tokens of the other.

    Each probability counts once, at the first token that it is aligned with, so that the product
    over the text is unchanged.
    """
    carried = [1.0] * count
    used = set[int]()
    for source, destination in pairs:
        if source not in used:
            used.add(source)
            carried[destination] *= probabilities[source]
    return carried
