"""Confidence intervals of products of sums over prompts. Shapes: P prompts, C columns, R
resamples.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Floats = NDArray[np.float64]
Interval = list[float] | None
TINY = 1e-9  # a standard error of a log below this is rounding
FEW = 8  # prompts below which the bootstrap covers too little


def interval(columns: Floats, signs: Sequence[int], draws: int = 2000) -> Interval:
    """Return the 95 % confidence interval of the product over columns [P, C] of (the column's sum)
    ** (its sign, 1 or -1).

    Bootstrap-t on the log scale (Efron and Tibshirani, 1993, section 12.5): prompts are resampled
    with a fixed seed and each resample's error is measured in its own standard error.
    scipy.stats.bootstrap has no such interval, and its BCa covers too
    little: of 300 evaluations of 8, 20 and 40 prompts 90, 90 and 96 %, where this one covers 94, 95
    and 97 %. Below 8 prompts, or if all resamples are equal, Student's t replaces it. The interval
    never leaves the range of the resamples, as it would if one prompt took most of the time because
    something else ran on the machine. Return None below 2 prompts or if a sum is 0. If prompts do
    not differ, return the value itself, and None below 8 prompts, where counts are equal by chance.
    A prompt of zeros only (without a round) is not counted.
    """
    columns = columns[columns.any(-1)]
    prompts = len(columns)
    if prompts < 2 or not columns.sum(0).all():
        return None
    sign = np.asarray(signs, dtype=np.float64)
    value, error = (float(part[0]) for part in _log_statistic(columns, sign, np.ones((1, prompts))))
    if prompts < FEW and error <= TINY:
        return None
    low = high = float(stdtrit(prompts - 1, 0.975))
    least = -np.inf
    most = np.inf
    if prompts >= FEW and error > TINY:
        weights = (
            np.random.default_rng(0)
            .multinomial(prompts, np.full(prompts, 1 / prompts), draws)
            .astype(np.float64)
        )
        values, errors = _log_statistic(columns, sign, weights[(weights @ columns).all(1)])
        if np.mean(errors > TINY) > 0.99:
            scores = (values - value)[errors > TINY] / errors[errors > TINY]
            high, low = np.quantile(scores, [0.975, 0.025]) * (1, -1)
            least = values.min()
            most = values.max()
    # a resample that errs upwards says that the truth lies below, so the upper score gives the
    # lower end
    ends = np.clip([value - high * error, value + low * error], least, most)
    return [round(float(np.exp(end)), 4) for end in ends]


def rounds_interval(columns: Floats) -> Interval:
    """Return the 95 % confidence interval of tokens per round, of the sums of tokens and rounds of
    each prompt [P, 2].
    """
    ends = interval(columns, (1, -1))
    # A forward emits at least one token.
    return None if ends is None else [max(1.0, end) for end in ends]


def _log_statistic(columns: Floats, sign: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Return the log statistic and its standard error [R] of resamples that take prompts
    `weights` [R, P] times.
    """
    prompts = len(columns)
    means = weights @ columns / prompts  # [R, C]
    influence = (sign / means) @ columns.T - sign.sum()  # [R, P]
    variance = (weights * influence**2).sum(1) / (prompts * (prompts - 1))
    return np.log(means) @ sign, np.sqrt(variance)
