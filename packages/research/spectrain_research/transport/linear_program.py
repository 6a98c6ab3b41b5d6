"""The choice of one of several independent drafts by a linear program over a few tokens. V
vocabulary, S of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spectrain.decoding.acceptance.base import Vector
from spectrain.errors import UserError

from .rules import StayChance, Tournament

MAX_TRUNCATED = 32  # tokens of a linear program, which has a variable for every pair of them
# probabilities are multiples of 1 / CHANCE_PARTS, which fractions represent exactly
CHANCE_PARTS = 2**20


@dataclass(eq=False)
class TruncatedLinearProgram(Tournament):
    """The truncated linear program (Khisti et al., 2024, appendix I): choose between two drafts to
    accept most.

    Tokens are ordered by p(x) - r(x) q(x), the largest first, r being the distribution of the draft
    chosen so far and q that of the next one. For every pair of the `truncated` first tokens the
    program finds the probability that one of them stays when it meets the other, so that the sum
    over them of min(p, r') is largest. For all other pairs the first token in this order stays.
    With all tokens of the vocabulary it is the optimum for two drafts; further drafts are compared
    one after another.
    """

    name = "programme"

    # Number of tokens between whose pairs the linear program decides.
    truncated: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.truncated <= MAX_TRUNCATED:
            raise UserError(
                f"acceptance.truncated={self.truncated}: use 1 to {MAX_TRUNCATED}; the linear "
                "program has a variable per pair"
            )

    def _stay_chances(self, p: Vector, q: Vector, count: int) -> tuple[list[StayChance], Vector]:
        stay_chances: list[StayChance] = []
        r = q
        for _ in range(1, count):
            pairs = PairwiseChoice.from_distributions(p, r, q, self.truncated)
            stay_chances.append(partial(pairs.stay_chance, p.sum() * 0 + 1))
            r = pairs.chosen_distribution(r, q)
        return stay_chances, r


@dataclass(frozen=True)
class PairwiseChoice:
    """The probabilities with which one of two tokens stays."""

    order: NDArray[np.int64]  # [V] tokens, those of the linear program first
    rank: NDArray[np.int64]  # [V] the index of each token in `order`
    # [S, S] the probability that the token of rank i stays when it meets that of rank j, in units
    # of 1 / CHANCE_PARTS.
    stay_parts: NDArray[np.int64]

    @classmethod
    def from_distributions(cls, p: Vector, r: Vector, q: Vector, count: int) -> PairwiseChoice:
        """Find the probabilities that accept most, for a draft from r that meets one from q."""
        order = np.argsort(-np.asarray(p - r * q, dtype=np.float64), kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        top = order[:count]
        target_probs, first, second = (
            np.asarray(weights[top], dtype=np.float64) for weights in (p, r, q)
        )
        rest_r, rest_q = (
            float(weights.sum()) - float(selected.sum())
            for weights, selected in ((r, first), (q, second))
        )
        return cls(
            order,
            rank,
            np.rint(solve_pairs(target_probs, first, second, rest_r, rest_q) * CHANCE_PARTS).astype(
                np.int64
            ),
        )

    def stay_chance(self, unit: Any, token: int, other: int) -> Any:
        """Return the probability that `token` stays when it meets `other`, in the number type of
        `unit`, which is 1.
        """
        i = self.rank[token]
        j = self.rank[other]
        if max(i, j) < len(self.stay_parts) and i != j:
            return unit * int(self.stay_parts[i, j]) / CHANCE_PARTS
        return unit if i <= j else unit * 0

    def chosen_distribution(self, r: Vector, q: Vector) -> Vector:
        """Return the distribution [V] of the token that stays."""
        first = r[self.order]
        second = q[self.order]
        count = len(self.stay_parts)
        later_r, later_q = (weights.sum() - weights.cumsum(0) for weights in (first, second))
        mass = first * second + first * later_q + later_r * second
        for i in range(count):
            mass[i] = (
                first[i] * (second[i] + second[count:].sum()) + first[count:].sum() * second[i]
            )
            for j in range(count):
                if i != j:
                    wins = int(self.stay_parts[i, j])
                    loses = CHANCE_PARTS - int(self.stay_parts[j, i])
                    mass[i] = (
                        mass[i]
                        + (first[i] * second[j] * wins + first[j] * second[i] * loses)
                        / CHANCE_PARTS
                    )
        distribution = r * 0
        distribution[self.order] = mass
        return distribution


def solve_pairs(
    p: NDArray[Any], r: NDArray[Any], q: NDArray[Any], rest_r: float, rest_q: float
) -> NDArray[Any]:
    """Solve the linear program: return the probabilities [S, S] that the first of two tokens stays.

    p, r and q [S] are those of its tokens; `rest_r` and `rest_q` are the mass of r and q elsewhere.
    """
    from scipy.optimize import linprog

    count = len(p)
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    identity = np.eye(count)
    # z, the accepted mass of each token, is at most p and at most r'
    bounds = np.zeros((2 * count, len(pairs) + count))
    bounds[:count, len(pairs) :] = bounds[count:, len(pairs) :] = identity
    for column, (i, j) in enumerate(pairs):
        bounds[count + i, column] -= r[i] * q[j]
        bounds[count + j, column] += r[i] * q[j]
    # The mass of each token that does not depend on the decisions, plus all that it could lose as
    # the next draft.
    base = r * q + r * max(rest_q, 0.0) + max(rest_r, 0.0) * q + q * (r.sum() - r)
    gains = np.concatenate([np.zeros(len(pairs)), -np.ones(count)])
    solution = linprog(
        gains, A_ub=bounds, b_ub=np.concatenate([p, base]), bounds=(0, 1), method="highs"
    )
    assert solution.success, solution.message
    chances = np.ones((count, count))
    for column, (i, j) in enumerate(pairs):
        chances[i, j] = min(max(solution.x[column], 0.0), 1.0)
    return chances
