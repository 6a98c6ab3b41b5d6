"""The optimal acceptance that no lossless rule exceeds, for given drafts. V vocabulary, K drafts of
one node.

A rule transports drafts to the target's distribution, and each accepted draft is worth one. For one
node the optimum has a closed form, cheap enough for a full vocabulary. For a full round, over
trees, it is a linear program, for small vocabularies only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spectrain.decoding.acceptance.base import Siblings
from spectrain.trees.token_tree import Children

Floats = NDArray[np.float64]
Path = tuple[int, ...]  # the tokens from the root to a node
MIN_PROB = 1e-10  # smallest probability of a token in H
# The grid of log-time over which `_probability_within` integrates: exact to 1e-8.
LOG_TIME_STEP = 0.5
LOG_TIME_START = -24.0
LOG_TIME_END = 30.0
MAX_ARRAY_SIZE = 2**20  # numbers of an array


def optimal_acceptance(siblings: Siblings, children: Children) -> float:
    """Return the largest probability that one of a node's children is accepted, over the draws (Hu
    et al., 2025).

    It is 1 - max over sets H of tokens of P(all drafts lie in H) - p(H): where they do, the
    target's token lies in H with probability at most p(H). For drawn children the best H holds the
    tokens with the largest q / p.
    """
    p = np.asarray(siblings.p, dtype=np.float64)
    count = len(siblings.tokens)
    if children == "deterministic":
        return float(p[list(set(siblings.tokens))].sum())
    q = np.asarray(siblings.q, dtype=np.float64)
    if children == "top_and_sampled":
        return float(
            p[[token for token in siblings.tokens if not q[token] > 0]].sum()
            + np.minimum(p, q).sum()
        )
    order = np.flatnonzero(q > MIN_PROB)
    order = order[np.argsort(p[order] / q[order], kind="stable")]
    within = np.cumsum(q[order])
    mass = np.cumsum(p[order])
    chance = within**count if children == "sampled" else _probability_within(q[order], count)
    return float(1 - max(0.0, (chance - mass).max()))


def _probability_within(q: Floats, count: int) -> Floats:
    """Return the probability that `count` tokens drawn without replacement all lie among the first
    1, 2, .. V of q [V].

    Such a draw is a race: token x arrives after an exponential time with rate q(x), and the first
    `count` are drawn. All lie in H if at least `count` tokens of H arrive before the time t of the
    first arrival outside of H. Fewer arrive with probability exp(-q(H) t) sum over j < count of
    e_j, the elementary symmetric sums of exp(q(x) t) - 1 over H, and t has the density (1 - q(H))
    exp(-(1 - q(H)) t). The integral is over log t, where the trapezoid rule is exact up to
    rounding.
    """
    outside_mass = np.clip(1 - np.cumsum(q), 0, None)
    fewer_probability = np.zeros_like(q)
    log_times = np.arange(LOG_TIME_START, LOG_TIME_END, LOG_TIME_STEP)
    for part in np.array_split(log_times, max(1, len(log_times) * len(q) // MAX_ARRAY_SIZE)):
        time = np.exp(part)[:, None]
        log_weight = q * time + np.log(-np.expm1(-q * time))  # [times, V] of exp(q t) - 1
        log_sum = np.zeros_like(log_weight)  # of e_0
        total = np.exp(log_sum - time)
        for number in range(1, count):
            # of e_(number - 1) over no token
            empty = np.full_like(time, 0.0 if number == 1 else -np.inf)
            earlier = np.concatenate([empty, log_sum[:, :-1]], axis=1)
            log_sum = np.logaddexp.accumulate(log_weight + earlier, axis=1)
            total += np.exp(log_sum - time)
        fewer_probability += outside_mass * (total * time).sum(0) * LOG_TIME_STEP
    result = np.where(outside_mass > 0, np.clip(1 - fewer_probability, 0, 1), 1.0)
    result[: count - 1] = 0
    return result


def optimal_round_length(
    trees: Iterable[tuple[float, Iterable[Path]]], p: Mapping[Path, Any], length: int
) -> float:
    """Return the largest expected number of drafted tokens that a lossless rule accepts in a round,
    by a linear program.

    `trees` are all trees that can be drawn, each with its probability and the paths of its nodes. A
    rule maps each of them to an accepted path and a token after it, and the target continues. Among
    all plans whose first `length` tokens have the target's joint distribution, the program finds
    the one that accepts most. p has the target's distribution after each path shorter than
    `length`, the depth of the trees.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    merged: dict[frozenset[Path], float] = {}
    for chance, paths in trees:
        key = frozenset(paths) | {()}
        merged[key] = merged.get(key, 0.0) + float(chance)
    vocab = len(p[()])
    texts = list(itertools.product(range(vocab), repeat=length))
    joint = {
        text: math.prod(float(p[text[:end]][token]) for end, token in enumerate(text))
        for text in texts
    }
    # coefficients of the constraints: value, row, column
    entries: list[tuple[float, int, int]] = []
    gains: list[int] = []
    for number, tree in enumerate(merged):
        for path in tree:
            for head in (
                [(*path, token) for token in range(vocab)] if len(path) < length else [path]
            ):
                column = len(gains)
                gains.append(-len(path))
                entries.append((1.0, len(texts) + number, column))
                for row, text in enumerate(texts):
                    if text[: len(head)] == head:
                        after = math.prod(
                            float(p[text[:end]][text[end]]) for end in range(len(head), length)
                        )
                        entries.append((after, row, column))
    totals = [*joint.values(), *merged.values()]
    values, rows, columns = zip(*entries)
    plan = coo_array((values, (rows, columns)), shape=(len(totals), len(gains)))
    solution = linprog(gains, A_eq=plan.tocsr(), b_eq=totals, bounds=(0, None), method="highs")
    assert solution.success, solution.message
    return float(-solution.fun)
