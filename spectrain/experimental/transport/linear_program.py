"""The choice of one of several independent drafts by a linear programme over a few tokens. V vocabulary, S tokens of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spectrain.decoding.acceptance.base import Vector
from spectrain.errors import UserError

from .rules import StayChance, Tournament

MAX_TRUNCATED = 32  # tokens that a programme decides between: it has a variable for every pair of them
CHANCE_PARTS = 2**20  # a chance is one of so many parts, so that fractions hold it too


class TruncatedLinearProgram(Tournament):
    """The truncated linear programme (Khisti et al., 2024, appendix I): which of two drafts stays is chosen to keep most.

    Tokens are ordered by p(x) - r(x) q(x), the largest first, r being that of the draft chosen so far and q that of the one it
    meets. For every pair of the `truncated` first ones the programme finds the chance that the one stays when it meets the
    other, so that the sum over them of min(p, r') is largest. Elsewhere the token that comes first in this order stays. With
    as many tokens as the vocabulary has it is the optimum of two drafts; of more it is this once for every further one.
    """

    name = "programme"

    def __init__(
        self,
        # Temperature of the target's distribution; it must be above 0.
        temperature: float = 1.0,
        # Number of most likely target tokens to sample from; 0 uses the whole vocabulary.
        top_k: int = 0,
        # Share of the probability mass to sample from, the most likely tokens first; 1 uses all of it.
        top_p: float = 1.0,
        # Seed of the random draws.
        seed: int = 0,
        # Number of tokens between whose pairs the linear program decides.
        truncated: int = 5,
    ) -> None:
        super().__init__(temperature, top_k, top_p, seed)
        if not 1 <= truncated <= MAX_TRUNCATED:
            raise UserError(
                f"acceptance.truncated={truncated}: use 1 to {MAX_TRUNCATED}, whose pairs the programme decides about"
            )
        self.truncated = truncated

    def _stay_chances(self, p: Vector, q: Vector, count: int) -> tuple[list[StayChance], Vector]:
        found: list[StayChance] = []
        r = q
        for _ in range(1, count):
            pairs = PairwiseChoice.from_distributions(p, r, q, self.truncated)
            found.append(partial(pairs.stay_chance, p.sum() * 0 + 1))
            r = pairs.chosen_distribution(r, q)
        return found, r


@dataclass(frozen=True)
class PairwiseChoice:
    """Who stays of two tokens."""

    order: NDArray[np.int64]  # [V] the tokens, those that are decided about first
    rank: NDArray[np.int64]  # [V] the place of each token in it
    stay_parts: NDArray[
        np.int64
    ]  # [S, S] the chance that the token of rank i stays when it meets that of rank j, in parts of FINE

    @classmethod
    def from_distributions(cls, p: Vector, r: Vector, q: Vector, count: int) -> PairwiseChoice:
        """What keeps most where the one comes from r, the other from q."""
        order = np.argsort(-np.asarray(p - r * q, dtype=np.float64), kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        top = order[:count]
        wanted, first, second = (np.asarray(one[top], dtype=np.float64) for one in (p, r, q))
        rest_r, rest_q = (float(one.sum()) - float(some.sum()) for one, some in ((r, first), (q, second)))
        return cls(order, rank, np.rint(solve_pairs(wanted, first, second, rest_r, rest_q) * CHANCE_PARTS).astype(np.int64))

    def stay_chance(self, unit: Any, token: int, other: int) -> Any:
        """The chance that `token` stays when it meets `other`, in the kind of number that `one` is."""
        i, j = self.rank[token], self.rank[other]
        if max(i, j) < len(self.stay_parts) and i != j:
            return unit * int(self.stay_parts[i, j]) / CHANCE_PARTS
        return unit if i <= j else unit * 0

    def chosen_distribution(self, r: Vector, q: Vector) -> Vector:
        """The distribution [V] of the token that stays."""
        first, second = r[self.order], q[self.order]
        count = len(self.stay_parts)
        later_r, later_q = (one.sum() - one.cumsum(0) for one in (first, second))
        found = first * second + first * later_q + later_r * second
        for i in range(count):
            found[i] = first[i] * (second[i] + second[count:].sum()) + first[count:].sum() * second[i]
            for j in range(count):
                if i != j:
                    wins, loses = int(self.stay_parts[i, j]), CHANCE_PARTS - int(self.stay_parts[j, i])
                    found[i] = found[i] + (first[i] * second[j] * wins + first[j] * second[i] * loses) / CHANCE_PARTS
        placed = r * 0
        placed[self.order] = found
        return placed


def solve_pairs(p: NDArray[Any], r: NDArray[Any], q: NDArray[Any], rest_r: float, rest_q: float) -> NDArray[Any]:
    """The chances [S, S] that the first of two tokens stays: the programme, of p, r and q [S] of those that it decides about
    and of what r and q have elsewhere."""
    from scipy.optimize import linprog

    count = len(p)
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    kept = np.eye(count)
    most = np.zeros((2 * count, len(pairs) + count))  # of z, what is kept of each token: at most p, and at most r'
    most[:count, len(pairs) :] = most[count:, len(pairs) :] = kept
    for column, (i, j) in enumerate(pairs):
        most[count + i, column] -= r[i] * q[j]
        most[count + j, column] += r[i] * q[j]
    # what is there of token x whatever the programme decides, and all that it could lose as the one that is met
    base = r * q + r * max(rest_q, 0.0) + max(rest_r, 0.0) * q + q * (r.sum() - r)
    gains = np.concatenate([np.zeros(len(pairs)), -np.ones(count)])
    found = linprog(gains, A_ub=most, b_ub=np.concatenate([p, base]), bounds=(0, 1), method="highs")
    assert found.success, found.message
    chances = np.ones((count, count))
    for column, (i, j) in enumerate(pairs):
        chances[i, j] = min(max(found.x[column], 0.0), 1.0)
    return chances
