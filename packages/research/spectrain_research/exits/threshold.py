"""The confidence above which an exit's token is trusted, estimated from what the target said about
every token (FREE, section 3.3).

Shapes: N observed tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta
from torch import Tensor

# Number of observed tokens below which the threshold stays as it is.
FEWEST = 16
# Confidences that count as observed of either kind before decoding: those of a broad symmetric
# distribution, Beta(2.5, 2.5). A kind that was never observed has a distribution too, so an exit
# that is always right lowers the threshold.
PRIOR = np.array([0.25, 0.5, 0.75])
GRID = np.linspace(0.005, 0.995, 199)


class BetaMoments:
    """The number, sum and sum of squares of values in (0, 1), to which a Beta distribution is
    fitted.
    """

    def __init__(self, values: NDArray[np.float64]) -> None:
        self.count = 0
        self.total = 0.0
        self.squares = 0.0
        self.add(values)

    def add(self, values: NDArray[np.float64]) -> None:
        self.count += len(values)
        self.total += float(values.sum())
        self.squares += float((values**2).sum())

    def fit_beta(self) -> tuple[float, float]:
        """Return the two parameters of the Beta distribution with the same mean and variance."""
        mean = self.total / self.count
        variance = max(self.squares / self.count - mean**2, 1e-4)
        scale = max(mean * (1 - mean) / variance - 1, 1e-2)
        return max(mean * scale, 1e-2), max((1 - mean) * scale, 1e-2)


class ThresholdEstimator:
    """FREE's mixture of two Beta distributions: the confidence of exits that agree with the target,
    and of those that do not.

    As in the authors' published code, tokens have labels and each distribution is fitted by its
    moments. The condition differs: their code compares the two densities with equal weights at ten
    confidences from 0.3 to 0.9, with a level of 0.4, after each of the first 300 texts. Here how
    often each kind occurs is counted, so that the mixture's posterior is Bayes' rule. The
    estimate is right if every token is observed, also those whose confidence was below the
    threshold. If only those above it were observed, the estimate would depend on the threshold that
    it replaces.
    """

    def __init__(self) -> None:
        self.num_observed = 0
        self.right = BetaMoments(PRIOR)
        self.wrong = BetaMoments(PRIOR)

    def observe(self, confidences: Tensor, agreed: Tensor) -> None:
        """Add tokens with their confidences [N], and whether [N] the target agreed."""
        values = np.clip(confidences.double().cpu().numpy(), 1e-4, 1 - 1e-4)
        labels = agreed.cpu().numpy()
        self.num_observed += len(values)
        self.right.add(values[labels])
        self.wrong.add(values[~labels])

    def threshold(self, level: float) -> float | None:
        """Return the smallest confidence from which on an exit agrees with the target with a
        probability of at least `level`.

        None after too few tokens. A surer exit is taken to be no less right: the fitted posterior
        counts with its maximum from there on. If it rises more than once before, the last point
        below the level decides.
        """
        if self.num_observed < FEWEST:
            return None
        right = self.right.count * beta.pdf(GRID, *self.right.fit_beta())
        wrong = self.wrong.count * beta.pdf(GRID, *self.wrong.fit_beta())
        posterior = right / (right + wrong + 1e-12)
        top = int(posterior.argmax())
        if posterior[top] < level:
            return float(GRID[-1])
        below = np.flatnonzero(posterior[:top] < level)
        return float(GRID[below[-1] + 1 if len(below) else 0])
