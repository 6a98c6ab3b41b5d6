"""How much worse the worst group of prompts is than the best one, as languages or categories.

Shapes: P prompts, 2 sums (tokens, rounds).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.special import stdtrit

from spectrain.eval.intervals import Floats, Interval


@dataclass(frozen=True)
class Disparity:
    """The tokens per forward of the worst group over those of the best."""

    worst: str
    best: str
    ratio: float
    # 95 % interval, which holds for every pair of groups together, so that it may be read for the
    # pair that is chosen by the numbers; None with a group of one prompt.
    ci95: Interval


def compare_groups(groups: Mapping[str, Floats]) -> Disparity | None:
    """Compare the groups with the fewest and the most tokens per forward, by the sums [P, 2] of
    each prompt; None with fewer than two groups that have a round.
    """
    groups = {name: sums[sums[:, 1] > 0] for name, sums in groups.items() if sums[:, 1].any()}
    if len(groups) < 2:
        return None
    lengths = {name: float(sums[:, 0].sum() / sums[:, 1].sum()) for name, sums in groups.items()}
    worst = min(lengths, key=lengths.__getitem__)
    best = max(lengths, key=lengths.__getitem__)
    ratio = lengths[worst] / lengths[best]
    if min(map(len, groups.values())) < 2:
        return Disparity(worst, best, round(ratio, 4), None)
    # Bonferroni's correction for all pairs from which the two are chosen.
    num_pairs = len([*combinations(groups, 2)])
    freedom = sum(map(len, groups.values())) - len(groups)
    # Groups of a few prompts say little of their own variance, so all share one.
    variance = sum(map(_sum_squares, groups.values())) / freedom
    error = (variance * (1 / len(groups[worst]) + 1 / len(groups[best]))) ** 0.5
    margin = float(stdtrit(freedom, 1 - 0.025 / num_pairs)) * error
    ends = [round(float(ratio * np.exp(side * margin)), 4) for side in (-1, 1)]
    return Disparity(worst, best, round(ratio, 4), ends)


def _sum_squares(sums: Floats) -> float:
    """Return the sum of squares of what each prompt adds to the logarithm of tokens per round, in
    units of one prompt.
    """
    means = sums.mean(0)
    influence = sums[:, 0] / means[0] - sums[:, 1] / means[1]
    return float((influence**2).sum())
