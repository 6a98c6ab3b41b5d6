"""The confidence above which an exit's token is trusted, estimated from what the target said later (FREE, section 3.3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

FEWEST = 8  # observations of either kind below which the threshold stays as it is
GRID = np.linspace(0.005, 0.995, 199)


def fit_beta(values: NDArray[np.float64]) -> tuple[float, float]:
    """Fit the two parameters of a Beta distribution to values in (0, 1) by their mean and variance."""
    mean, variance = float(values.mean()), max(float(values.var()), 1e-4)
    scale = max(mean * (1 - mean) / variance - 1, 1e-2)
    return max(mean * scale, 1e-2), max((1 - mean) * scale, 1e-2)


def estimate_threshold(confidences: list[float], agreed: list[bool], level: float, previous: float) -> float:
    """Return the smallest confidence from which on an exit agrees with the target with a probability of at least `level`.

    Confidences with and without agreement have a Beta distribution each; which kind occurs how often is counted, so that the
    mixture's posterior is Bayes' rule. With too few observations of a kind, `previous` is returned.
    """
    values, labels = np.clip(np.array(confidences), 1e-4, 1 - 1e-4), np.array(agreed, dtype=bool)
    if min(labels.sum(), (~labels).sum()) < FEWEST:
        return previous
    share = labels.mean()
    right = share * beta.pdf(GRID, *fit_beta(values[labels]))
    wrong = (1 - share) * beta.pdf(GRID, *fit_beta(values[~labels]))
    posterior = right / (right + wrong + 1e-12)
    # The posterior need not rise everywhere: the last point below the level decides.
    below = np.flatnonzero(posterior < level)
    return float(GRID[min(below[-1] + 1, len(GRID) - 1)]) if len(below) else float(GRID[0])
