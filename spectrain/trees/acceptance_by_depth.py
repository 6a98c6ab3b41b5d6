"""Acceptance by depth, as a drafter predicts it and as it is observed. Shapes: B batch, D depth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LARGEST_TRUST = 1.5
LEAST_TRUST = 0.05
"""Bounds of the factor by which predicted acceptance is corrected."""


class AcceptanceByDepth:
    """Running means of predicted and observed acceptance [D] of the depths 1 to D."""

    def __init__(self, depth: int, memory: int) -> None:
        self.rate = 1 / memory
        self.predicted = np.ones(depth)
        self.observed = np.ones(depth)

    def log_trust(self) -> np.ndarray:
        """Return the logarithms [D] of the factors by which path probabilities are corrected;
        they fall with depth.
        """
        trust: np.ndarray = np.log(
            np.minimum.accumulate(
                np.clip(self.observed / self.predicted, LEAST_TRUST, LARGEST_TRUST)
            )
        )
        return trust

    def next_chance(self, depth: int) -> float:
        """Return the observed chance that, after an accepted node of `depth`, its child is
        accepted.
        """
        return float(self.observed[depth] / max(self.observed[depth - 1], 1e-6))

    def record(
        self, expected: np.ndarray, counts: Sequence[int], num_drafted: Sequence[int]
    ) -> None:
        """Record the `expected` tokens [B, 1 + D] by depth of a round, its new tokens [B], and
        the nodes of its trees [B].
        """
        depths = np.arange(1, len(self.observed) + 1)
        for chances, count, size in zip(expected[:, 1:], counts, num_drafted):
            if count and size > 1:
                is_drafted = chances > 0
                self.predicted += self.rate * is_drafted * (chances - self.predicted)
                self.observed += self.rate * is_drafted * ((count > depths) - self.observed)
