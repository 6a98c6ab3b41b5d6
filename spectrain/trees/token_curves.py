"""Expected tokens of drafted trees by their size. Shapes: D levels at most, N nodes at most."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .measurements import Latency


class TokenCurves:
    """Running means [D, N] of the tokens that trees of so many levels and nodes, the root
    included, are expected to yield.
    """

    def __init__(self, depth: int, budget: int, memory: int) -> None:
        self.memory = memory
        self.tokens = np.zeros((depth, budget))
        self.num_rounds = 0  # rounds in the means, at most memory

    def add(self, curves: Sequence[np.ndarray]) -> None:
        """Add a round's expected tokens by nodes, one curve per level that was drafted; other
        levels repeat the last one.
        """
        self.num_rounds = min(self.num_rounds + 1, self.memory)
        complete = np.empty_like(self.tokens)
        for level, curve in enumerate(curves):
            complete[level, : len(curve)], complete[level, len(curve) :] = curve, curve[-1]
        complete[len(curves) :] = complete[len(curves) - 1]
        self.tokens += (complete - self.tokens) / self.num_rounds

    def find_best_round(self, latency: Latency, top_k: int, context: int) -> tuple[float, float]:
        """Return the expected tokens, and the cost in plain steps, of the tree of 2 nodes or more
        that gains most behind `context` tokens."""
        depth, budget = self.tokens.shape
        verify = np.array([latency.estimate_verify(size, context) for size in range(1, budget + 1)])
        spent = latency.start_seconds + np.arange(depth)[:, None] * latency.estimate_step(
            top_k, context
        )
        tokens = self.tokens[:, 1:]
        costs = ((spent + verify) / verify[0])[:, 1:]
        best = np.argmax(tokens - costs)
        return float(tokens.flat[best]), float(costs.flat[best])
