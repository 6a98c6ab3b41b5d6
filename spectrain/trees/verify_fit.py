"""A fit of verification times that follows the machine while it decodes (ProPD, Zhong et al.,
2024).

ProPD fits seconds = beta_0 + beta_1 n over trees of n nodes by least squares, with weights that
fall with a round's age. Here n is the calibrated time of the tree, which is linear in its nodes
where the machine's is. Other work on the machine once changed the slope of such a fit within a few
rounds, so the slope stays within `SLOPE_RANGE` times the calibrated one.
"""

from __future__ import annotations

import math

import numpy as np

SLOPE_RANGE = 0.5, 2.0
MIN_ROUNDS = 8
"""Rounds before which the calibrated times are used."""


class VerifyFit:
    """Weighted least squares of measured verification seconds on calibrated ones; a round weighs
    exp(-age / memory).
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.fade = math.exp(-1 / memory)
        self.num_rounds = 0
        # Weighted sums of 1, x, t, x^2 and x t, for calibrated seconds x and measured ones t.
        self.sums = np.zeros(5)

    def record(self, calibrated: float, measured: float) -> None:
        """Add a round that verified a tree in `measured` seconds."""
        x = calibrated
        t = measured
        self.sums = self.fade * self.sums + np.array([1.0, x, t, x * x, x * t])
        self.num_rounds += 1

    def coefficients(self) -> tuple[float, float]:
        """Return beta_0 and beta_1, the latter in units of the calibrated slope."""
        if self.num_rounds < MIN_ROUNDS:
            return 0.0, 1.0
        weight, x, t, xx, xt = self.sums
        variance = xx - x * x / weight
        slope = (xt - x * t / weight) / variance if variance > 1e-6 * xx else 1.0
        slope = min(max(slope, SLOPE_RANGE[0]), SLOPE_RANGE[1])
        return float((t - slope * x) / weight), float(slope)

    def correct(self, calibrated: list[float]) -> list[float]:
        """Return the expected seconds of trees with these calibrated ones, at least half of
        them.
        """
        base, slope = self.coefficients()
        return [max(base + slope * seconds, 0.5 * seconds) for seconds in calibrated]
