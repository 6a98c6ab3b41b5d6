"""How much worse the worst group of prompts is than the best one, as languages or categories.

Shapes: G groups, P prompts, 2 sums (tokens, rounds).
"""

from collections.abc import Mapping, Sequence
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


def compare_groups(
    groups: Mapping[str, Floats], questions: Mapping[str, Sequence[str]] | None = None
) -> Disparity | None:
    """Compare the groups with the fewest and the most tokens per forward, by the sums [P, 2] of
    each prompt; None with fewer than two groups that have a round.

    questions: the names of each group's prompts. Where all groups have the same ones, as questions
    that were translated, what a question adds to all groups is no part of the error.
    """
    names = questions or {}
    names_by_group = {
        group: [name for name, row in zip(names.get(group, ()), sums) if row[1] > 0]
        for group, sums in groups.items()
    }
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
    residuals = {name: _find_influence(sums) for name, sums in groups.items()}
    freedom = sum(map(len, groups.values())) - len(groups)
    if order := _pair_questions([names_by_group[name] for name in groups]):
        blocks = np.stack([residuals[name][rows] for name, rows in zip(groups, order)])  # [G, P]
        residuals = dict(zip(groups, blocks - blocks.mean(0)))
        freedom = (len(blocks) - 1) * (blocks.shape[1] - 1)
    # Groups of a few prompts say little of their own variance, so all share one.
    variance = sum(float((values**2).sum()) for values in residuals.values()) / freedom
    error = (variance * (1 / len(groups[worst]) + 1 / len(groups[best]))) ** 0.5
    margin = float(stdtrit(freedom, 1 - 0.025 / num_pairs)) * error
    ends = [round(float(ratio * np.exp(side * margin)), 4) for side in (-1, 1)]
    return Disparity(worst, best, round(ratio, 4), ends)


def name_questions(ids: Sequence[str], group: str) -> list[str]:
    """Return the questions that a group's prompts ask, by their ids without the group's name."""
    return [name.removesuffix(f"-{group.lower()}") for name in ids]


def _pair_questions(questions: Sequence[Sequence[str]]) -> list[list[int]]:
    """Return the rows of every group in one order of the questions; empty if the groups do not
    have the same questions, once each.
    """
    first = sorted(questions[0])
    if not first or any(
        sorted({*names}) != first or len(names) != len(first) for names in questions
    ):
        return []
    return [[names.index(question) for question in first] for names in questions]


def _find_influence(sums: Floats) -> Floats:
    """Return what each prompt [P] adds to the logarithm of tokens per round, in units of one
    prompt.
    """
    means = sums.mean(0)
    influence: Floats = sums[:, 0] / means[0] - sums[:, 1] / means[1]
    return influence
