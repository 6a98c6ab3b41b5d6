"""The most that any lossless rule could keep of given drafts. V vocabulary, K drafts of one node.

A rule carries what was drafted to the target's distribution: an optimal transport, where each draft that is kept is worth one.
Of one node's drafts the best has a closed form, cheap enough for a whole vocabulary; of a whole round, over trees, it is a
linear programme, for small vocabularies only.
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
MIN_PROB = 1e-10  # chance of a token that is worth a place in H
LOG_TIME_STEP, LOG_TIME_START, LOG_TIME_END = (
    0.5,
    -24.0,
    30.0,
)  # of the logarithm of time, over which `_all_within` integrates: good to 1e-8
MAX_ARRAY_SIZE = 2**20  # numbers of an array


def optimal_acceptance(siblings: Siblings, children: Children) -> float:
    """The largest chance that one of a node's children is kept, over how those that are drawn may fall (Hu et al., 2025).

    It is 1 - max over sets H of tokens of P(all drafts lie in H) - p(H): where they do, the target's own token lies there too
    in p(H) of the cases at most. For drawn children the best H holds the tokens of the largest q / p.
    """
    p, count = np.asarray(siblings.p, dtype=np.float64), len(siblings.tokens)
    if children == "deterministic":
        return float(p[list(set(siblings.tokens))].sum())
    q = np.asarray(siblings.q, dtype=np.float64)
    if children == "top_and_sampled":
        return float(p[[token for token in siblings.tokens if not q[token] > 0]].sum() + np.minimum(p, q).sum())
    order = np.flatnonzero(q > MIN_PROB)
    order = order[np.argsort(p[order] / q[order], kind="stable")]
    within, mass = np.cumsum(q[order]), np.cumsum(p[order])
    chance = within**count if children == "sampled" else _chance_within(q[order], count)
    return float(1 - max(0.0, (chance - mass).max()))


def _chance_within(q: Floats, count: int) -> Floats:
    """The chance that `count` tokens drawn without replacement all lie among the first 1, 2, .. V of q [V].

    Drawing so is a race: token x arrives after a time that is exponential at rate q(x), and the first `count` are drawn. All
    lie in H where, by the time t of the first arrival outside of it, no fewer than `count` of H are there. Fewer are with
    chance exp(-q(H) t) sum over j < count of e_j, the elementary symmetric sums of exp(q(x) t) - 1 over H, and t has the
    density (1 - q(H)) exp(-(1 - q(H)) t). It is integrated over log t, where the trapezoid rule is exact but for rounding.
    """
    outside, fewer = np.clip(1 - np.cumsum(q), 0, None), np.zeros_like(q)
    log_times = np.arange(LOG_TIME_START, LOG_TIME_END, LOG_TIME_STEP)
    for part in np.array_split(log_times, max(1, len(log_times) * len(q) // MAX_ARRAY_SIZE)):
        time = np.exp(part)[:, None]
        log_weight = q * time + np.log(-np.expm1(-q * time))  # [times, V] of exp(q t) - 1
        log_sum = np.zeros_like(log_weight)  # of e_0
        total = np.exp(log_sum - time)
        for number in range(1, count):
            none = np.full_like(time, 0.0 if number == 1 else -np.inf)  # of e_(number - 1) over no token
            before = np.concatenate([none, log_sum[:, :-1]], axis=1)
            log_sum = np.logaddexp.accumulate(log_weight + before, axis=1)
            total += np.exp(log_sum - time)
        fewer += outside * (total * time).sum(0) * LOG_TIME_STEP
    found = np.where(outside > 0, np.clip(1 - fewer, 0, 1), 1.0)
    found[: count - 1] = 0
    return found


def optimal_round_length(trees: Iterable[tuple[float, Iterable[Path]]], p: Mapping[Path, Any], length: int) -> float:
    """The largest expected number of drafted tokens that a lossless rule keeps in a round, by a linear programme.

    A rule answers each of the `trees` that can be drawn, given with its chance as the paths of its nodes, by a kept path and a
    token after it, and the target goes on. Of all plans whose first `length` tokens have the target's joint distribution the
    one that keeps most is found. p: the target's distribution after each path shorter than `length`, the depth of the trees.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    merged: dict[frozenset[Path], float] = {}
    for chance, paths in trees:
        key = frozenset(paths) | {()}
        merged[key] = merged.get(key, 0.0) + float(chance)
    vocab = len(p[()])
    texts = list(itertools.product(range(vocab), repeat=length))
    joint = {text: math.prod(float(p[text[:end]][token]) for end, token in enumerate(text)) for text in texts}
    entries: list[tuple[float, int, int]] = []  # of the plan's constraints: value, row, column
    gains: list[int] = []
    for number, tree in enumerate(merged):
        for path in tree:
            for head in [(*path, token) for token in range(vocab)] if len(path) < length else [path]:
                column = len(gains)
                gains.append(-len(path))
                entries.append((1.0, len(texts) + number, column))
                for row, text in enumerate(texts):
                    if text[: len(head)] == head:
                        after = math.prod(float(p[text[:end]][text[end]]) for end in range(len(head), length))
                        entries.append((after, row, column))
    wanted = [*joint.values(), *merged.values()]
    values, rows, columns = zip(*entries)
    plan = coo_array((values, (rows, columns)), shape=(len(wanted), len(gains)))
    found = linprog(gains, A_eq=plan.tocsr(), b_eq=wanted, bounds=(0, None), method="highs")
    assert found.success, found.message
    return float(-found.fun)
