"""A drift test on accepted tokens per draft, with a stated rate of false alarms. Shapes: N
reference values, R resamples.

The test is a one-sided CUSUM (Page, 1954): S = max(0, S + (mean - x) / deviation - slack), and an
alarm where S exceeds a threshold. Mean and deviation are those of a reference. The threshold is
calibrated on the reference itself: the reference and the values after it are resampled, so that it
accounts for the reference's own error and needs no normal distribution.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
LEAST_SLACK = 0.25
SLACK_ERRORS = 1.5
"""The slack is the first, in standard deviations of a request, and so many standard errors of the
reference's mean: with less, the sum climbs by itself wherever the reference is a little too high,
and the threshold has to be many times as large."""
RESAMPLES = 2000
LEAST_DEVIATION = 0.05
"""A smaller standard deviation is taken as this, in tokens per draft, because a reference of
equal values promises nothing.
"""


class DriftTest:
    """Collects a reference, then tells with every value whether acceptance has fallen.

    Without a change, an alarm within `horizon` values has the probability `rate`; after as many the
    sum starts at 0 again.
    """

    def __init__(
        self, reference_size: int, horizon: int, rate: float, resamples: int = RESAMPLES
    ) -> None:
        self.reference_size = reference_size
        self.horizon = horizon
        self.rate = rate
        self.resamples = resamples
        self.restart()

    def restart(self) -> None:
        """Collect a new reference, as after a swap."""
        self.reference: list[float] = []
        self.mean = self.deviation = self.threshold = float("nan")
        self.sum = 0.0
        self.count = 0
        self.has_alarm = False

    @property
    def is_ready(self) -> bool:
        """Return whether the reference is complete."""
        return len(self.reference) >= self.reference_size

    def add(self, value: float) -> bool:
        """Add the mean accepted tokens per draft of a request; return whether this raises an
        alarm.
        """
        if not self.is_ready:
            self.reference.append(value)
            if self.is_ready:
                self._calibrate()
            return False
        if self.count >= self.horizon:
            self.sum = 0.0
            self.count = 0
        self.count += 1
        self.sum = max(
            0.0, self.sum + (self.mean - value) / self.deviation - choose_slack(self.reference_size)
        )
        is_alarm = self.sum > self.threshold and not self.has_alarm
        self.has_alarm |= is_alarm
        return is_alarm

    def _calibrate(self) -> None:
        values = np.array(self.reference)
        self.mean = float(values.mean())
        self.deviation = max(float(values.std(ddof=1)), LEAST_DEVIATION)
        self.threshold = calibrate_threshold(values, self.horizon, self.rate, self.resamples)


def choose_slack(reference_size: int) -> float:
    """Return how far below the reference a request may lie without raising the sum, in standard
    deviations.
    """
    return LEAST_SLACK + SLACK_ERRORS / reference_size**0.5


def calibrate_threshold(
    reference: Values, horizon: int, rate: float, resamples: int = RESAMPLES, seed: int = 0
) -> float:
    """Return the threshold that the largest sum of `horizon` values exceeds with probability
    `rate`, without a change.

    Each resample draws its own reference and the values after it. The quantile is the upper end of
    its own interval, so that the number of resamples makes the test slower rather than more often
    wrong.
    """
    generator = np.random.default_rng(seed)
    references = generator.choice(reference, (resamples, len(reference)))
    means = references.mean(1)
    # A resample has (N - 1) / N of the variance of what the reference was drawn from.
    shrinkage = np.sqrt(1 - 1 / len(reference))
    deviations = np.maximum(references.std(1, ddof=1) / shrinkage, LEAST_DEVIATION)
    slack = choose_slack(len(reference))
    sums = np.zeros(resamples)
    largest = np.zeros(resamples)
    for _ in range(horizon):
        steps = (means - generator.choice(reference, resamples)) / deviations - slack
        sums = np.maximum(0.0, sums + steps)
        largest = np.maximum(largest, sums)
    bound = max(0.0, rate - np.sqrt(rate * (1 - rate) / resamples))
    return float(np.quantile(largest, 1 - bound, method="higher"))
