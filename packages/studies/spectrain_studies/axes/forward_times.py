"""The time of a target's forward over its number of rows, fitted after MoESD (Huang et al., 2025,
arXiv 2505.19645).

The share of chosen experts is the paper's. The shape of the other terms was written from memory and
not compared with the paper's algorithm 1; the ridge is fitted instead of read from the hardware.

Shapes: N measured forwards, F features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import log

import numpy as np
from scipy.optimize import nnls

from spectrain.models.device import expert_weights
from spectrain.models.target import Target

LEAST_SIZES = 5
"""Different numbers of rows that a fit needs."""
GROWTHS = (1.0, 1.0003, 1.001, 1.003, 1.01, 1.03, 1.1, 1.3)
"""Factors of the time per row below the ridge that a fit tries."""
NUM_RIDGES = 24


@dataclass(frozen=True)
class ForwardTimes:
    """Seconds of a forward over t rows:

        a + b G(t) + c N(t) + d G(t share / N(t)),    N(t) = 1 - (1 - share)^t

    N is the share of a layer's experts that t rows choose, if each chooses `share` of them
    independently, and t share / N(t) are the rows of a chosen expert. G grows by the factor
    `growth` a row up to the ridge, where arithmetic begins to bind, and linearly behind it. A
    target without experts has a and b alone.
    """

    # Share of the experts that a row chooses; 1 without experts.
    share: float
    ridge: float
    growth: float
    # a, b, c and d, in seconds.
    coefficients: tuple[float, float, float, float]
    # Mean relative error of the times that were fitted.
    error: float

    def estimate_seconds(self, rows: float) -> float:
        """Return the seconds of a forward over so many rows."""
        return float(list_features(rows, self.share, self.ridge, self.growth) @ self.coefficients)

    def estimate_efficiency(self, texts: int, nodes: float) -> float:
        """Return the target efficiency T(B, 1) / T(B, n) of B texts with n rows each."""
        return self.estimate_seconds(texts) / self.estimate_seconds(texts * nodes)

    def find_best_batch(self, nodes: float, largest: int) -> int:
        """Return the number of texts, up to the largest, with the largest target efficiency."""
        return max(range(1, largest + 1), key=lambda texts: self.estimate_efficiency(texts, nodes))


def roofline_growth(rows: float, ridge: float, growth: float) -> float:
    """Return G: exponential up to the ridge, and its tangent behind it."""
    if rows <= ridge:
        return float(growth**rows)
    return float(growth**ridge * (1 + log(growth) * (rows - ridge)))


def list_features(rows: float, share: float, ridge: float, growth: float) -> np.ndarray:
    """Return what the four coefficients of `ForwardTimes` are multiplied with."""
    if share == 1:
        return np.array([1.0, roofline_growth(rows, ridge, growth), 0.0, 0.0])
    chosen = 1 - (1 - share) ** rows
    return np.array(
        [
            1.0,
            roofline_growth(rows, ridge, growth),
            chosen,
            roofline_growth(rows * share / chosen, ridge, growth),
        ]
    )


def fit_forward_times(
    rows: Sequence[float], seconds: Sequence[float], share: float
) -> ForwardTimes | None:
    """Fit the model to N measured forwards by their relative errors, with coefficients that are
    not negative; None for too few different numbers of rows.
    """
    if len({*rows}) < LEAST_SIZES or min(seconds) <= 0:
        return None
    weights = 1 / np.asarray(seconds, dtype=np.float64)

    def fit_shape(ridge: float, growth: float) -> tuple[float, ForwardTimes]:
        features = np.stack([list_features(count, share, ridge, growth) for count in rows])
        coefficients, distance = nnls(features * weights[:, None], np.ones(len(rows)))
        fixed, by_row, by_share, by_load = map(float, coefficients)
        error = float(np.abs(features @ coefficients * weights - 1).mean())
        return float(distance), ForwardTimes(
            share, round(ridge, 4), growth, (fixed, by_row, by_share, by_load), round(error, 4)
        )

    ridges = np.geomspace(min(rows), 2 * max(rows), NUM_RIDGES)
    fits = [fit_shape(float(ridge), growth) for ridge, growth in product(ridges, GROWTHS)]
    return min(fits, key=lambda pair: pair[0])[1]


def find_expert_share(target: Target) -> float:
    """Return the smallest share of its experts that a row chooses; 1 without experts."""
    return min((share for _, share in expert_weights(target.model)), default=1.0)


def describe_forward_times(fitted: dict[str, float]) -> Iterator[str]:
    """Say how well the fit describes the measured times, and where drafting costs least."""
    yield (
        "The time of the target's forward, fitted over its rows as in MoESD: mean error "
        f"{100 * fitted['error']:.1f} %; verifying {fitted['nodes']:.3g} rows a text costs least "
        f"with {fitted['best_batch']:g} of up to {fitted['largest']:g} texts, T(1) / T(n) = "
        f"{fitted['efficiency']:.2f}."
    )
