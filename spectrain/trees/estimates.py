"""What the policy of rounds estimates from the rounds so far. Shapes: B batch, D depths or levels,
N nodes at most.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from .measurements import Latency

# Last rounds of one kind whose median is compared with a round of the other kind, and last rounds
# with copies that count.
COMPARED_ROUNDS = 5
COPY_ROUNDS = 9
# Bounds of the slope of fitted verification times, and rounds before which the calibrated times are
# used.
SLOPE_RANGE = 0.5, 2.0
MIN_ROUNDS = 8
# Bounds of the factor by which predicted acceptance is corrected.
LARGEST_TRUST = 1.5
LEAST_TRUST = 0.05


@dataclass
class RunningMean:
    """The mean of all values at first, and of about the last `memory` values later."""

    value: float = 0.0
    # Values in the mean, at most the memory of the last update; at first those that the initial
    # value counts for.
    count: int = 0

    def add(self, value: float, memory: int) -> None:
        self.count = min(self.count + 1, memory)
        self.value += (value - self.value) / self.count


class TimeRatios:
    """Observed over modelled seconds of the last rounds, with the drafter (True) and without it
    (False).

    Every number of threads has its own, because its model errs in its own way. Medians count,
    because beside busy processes some rounds take several times as long.
    """

    def __init__(self) -> None:
        self.rounds = {kind: deque[float](maxlen=COMPARED_ROUNDS) for kind in (False, True)}
        self.copy_rounds = {kind: deque[float]([1.0], maxlen=COPY_ROUNDS) for kind in (False, True)}

    @property
    def has_drafted(self) -> bool:
        """Whether a drafted round was timed."""
        return bool(self.rounds[True])

    def compare(self, is_drafted: bool, ratio: float | None) -> float | None:
        """Add the ratio of a round, and return the ratio of drafted rounds divided by that of plain
        ones.

        The round is compared with the last rounds of the other kind only, so that a change of the
        machine's load affects both. A `ratio` of None marks a round whose time is not
        representative. Returns None where nothing can be compared.
        """
        if ratio is None:
            return None
        self.rounds[is_drafted].append(ratio)
        if not (others := self.rounds[not is_drafted]):
            return None
        return ratio / median(others) if is_drafted else median(others) / ratio

    def record_copies(self, with_drafter: bool, ratio: float) -> None:
        """Record the ratio of a round with copies."""
        self.copy_rounds[with_drafter].append(ratio)

    def estimate_copy_round(self, with_drafter: bool, seconds: float) -> float:
        """Return the expected seconds of a round with copies that is modelled to take `seconds`."""
        return median(self.copy_rounds[with_drafter]) * seconds


class VerifyFit:
    """A fit of verification times that follows the machine while it decodes (ProPD, Zhong et al.,
    2024).

    ProPD fits seconds = beta_0 + beta_1 n over trees of n nodes by least squares, where a round
    weighs exp(-age / memory). Here n is the calibrated time of the tree, which is linear in its
    nodes where the machine's is. Other work on the machine once changed the slope of such a fit
    within a few rounds, so the slope stays within `SLOPE_RANGE` times the calibrated one.
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
