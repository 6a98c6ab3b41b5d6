"""Rules for several drafts of one place, each a plan that carries drafts to the target's p. V vocabulary.

Judging a node is a transport problem: of what was drawn below it, p is to be reached from as much as possible. `optimum.py`
says how much any rule could keep; these rules differ in how near they come and in which drafts they take.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from spectrain.decoding.acceptance.base import Siblings, Vector
from spectrain.decoding.acceptance.sequential import (
    RandomSource,
    SequentialRule,
    VerifiedTree,
    acceptance_ratio,
    normalize_weights,
)
from spectrain.errors import UserError

StayChance = Callable[[int, int], Any]  # of a chosen token and the one that it meets, the chance that it stays
BISECTION_STEPS = 24  # of the interval that holds K-SEQ's division factor: it is right to a sixteen-millionth
MAX_WEIGHT_POWER = 20  # a token's weight is at most 2 to this power, or at least to minus it: drafts beyond are alike


class KSeq(SequentialRule):
    """K-SEQ (SpecTr, Sun et al., 2023, algorithm 2): k independent drafts in turn, each against p divided by rho.

    Draft x is kept with probability min(1, p(x) / (rho q(x))), so each of the k is with beta = sum min(q, p / rho), where no
    earlier one was. rho is the least that leaves p room for what k drafts keep, 1 - (1 - beta)^k = rho beta. Where none is
    kept the token is drawn from p - min(q, p / rho) (1 - (1 - beta)^k) / beta, normalised.
    """

    name = "kseq"
    lossless = True
    children = ("sampled",)

    def select_path(self, tree: VerifiedTree, random: RandomSource) -> tuple[list[int], int]:
        path = [0]
        while children := tree.children[path[-1]]:
            node = path[-1]
            p, q = tree.p(node), tree.q(node)
            rho = solve_divisor(p, q, len(children))
            for number, child in enumerate(children):
                token = tree.tokens[child]
                if random.flip_coin(acceptance_ratio(p[token], rho * q[token]), node, number):
                    path.append(child)
                    break
            else:
                return path, random.draw_token(_kseq_residual(p, q, rho, len(children)), node)
        return path, random.draw_token(tree.p(path[-1]), path[-1])

    def acceptance_chances(self, siblings: Siblings, rate: Any = 1) -> list[Any]:
        p, q, left, found = siblings.p, siblings.q, 1, []
        rho = solve_divisor(p, q, len(siblings.tokens))
        for token in siblings.tokens:
            keep = acceptance_ratio(p[token], rho * q[token])
            found.append(left * keep)
            left = left * (1 - keep)
        return found


def solve_divisor(p: Vector, q: Vector, count: int) -> Any:
    """K-SEQ's rho for `count` drafts, from 1 to `count`. Rounded up, as more than the least is lossless too."""
    low, high = p.sum() * 0 + 1, p.sum() * 0 + count  # of p's own kind of number
    for _ in range(BISECTION_STEPS if count > 1 else 0):
        middle = (low + high) / 2
        beta = elementwise_min(q, p / middle).sum()
        low, high = (low, middle) if 1 - (1 - beta) ** count <= middle * beta else (middle, high)
    return high


def _kseq_residual(p: Vector, q: Vector, rho: Any, count: int) -> Vector:
    """What the token is drawn from where K-SEQ keeps no draft."""
    kept = elementwise_min(q, p / rho)
    beta = kept.sum()
    return normalize_weights((p - kept * ((1 - (1 - beta) ** count) / beta)).clip(0), p) if beta > 0 else p


class Tournament(SequentialRule):
    """Of k independent drafts one is chosen and then judged as a single draft is (Khisti et al., 2024, section 3).

    Whatever the choice, it is lossless where the distribution r of the chosen token is known: it is kept with probability
    min(1, p / r), else the token is drawn from max(p - r, 0), normalised. Here drafts meet one after another, and the one
    chosen so far stays with a chance that is known of every pair of tokens; r follows from that exactly, draft by draft.
    """

    lossless = True
    children = ("sampled",)

    @abstractmethod
    def _stay_chances(self, p: Vector, q: Vector, count: int) -> tuple[list[StayChance], Vector]:
        """Of each draft but the first, the chance that the token chosen so far stays when it meets it; and r [V]."""

    def select_path(self, tree: VerifiedTree, random: RandomSource) -> tuple[list[int], int]:
        path = [0]
        while children := tree.children[path[-1]]:
            node, chosen = path[-1], children[0]
            p, q = tree.p(node), tree.q(node)
            duels, r = self._stay_chances(p, q, len(children))
            for number, (child, stays) in enumerate(zip(children[1:], duels), 1):
                if not random.flip_coin(stays(tree.tokens[chosen], tree.tokens[child]), node, number):
                    chosen = child
            token = tree.tokens[chosen]
            if not random.flip_coin(acceptance_ratio(p[token], r[token]), node):
                return path, random.draw_token(normalize_weights((p - r).clip(0), p), node)
            path.append(chosen)
        return path, random.draw_token(tree.p(path[-1]), path[-1])

    def acceptance_chances(self, siblings: Siblings, rate: Any = 1) -> list[Any]:
        p, tokens = siblings.p, siblings.tokens
        duels, r = self._stay_chances(p, siblings.q, len(tokens))
        chosen: list[Any] = [p.sum() * 0 + 1]
        for place, (token, duel) in enumerate(zip(tokens[1:], duels), 1):
            stays = [duel(one, token) for one in tokens[:place]]
            chosen.append(sum(chance * (1 - stay) for chance, stay in zip(chosen, stays)))
            chosen[:-1] = [chance * stay for chance, stay in zip(chosen, stays)]
        return [chance * acceptance_ratio(p[token], r[token]) for chance, token in zip(chosen, tokens)]


class ImportanceSampling(Tournament):
    """Importance-sampled choice (Khisti et al., 2024, section 4): of two drafts with weights v and w the first stays with
    probability v / (v + w).

    The weight is (p / q)^sharpness, with p / q rounded down to a power of 2, so that r takes sums over weights and not over
    pairs of tokens.
    """

    name = "importance"

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
        # Exponent of the importance weights p / q; larger values prefer more strongly what the target prefers.
        sharpness: int = 2,
    ) -> None:
        super().__init__(temperature, top_k, top_p, seed)
        if not 1 <= sharpness <= MAX_WEIGHT_POWER:
            raise UserError(
                f"acceptance.sharpness={sharpness}: use 1 to {MAX_WEIGHT_POWER}; beyond it all drafts would be alike"
            )
        self.sharpness = sharpness

    def _stay_chances(self, p: Vector, q: Vector, count: int) -> tuple[list[StayChance], Vector]:
        powers = self._weight_powers(p, q)

        def stays(one: int, other: int) -> Any:
            return _stay_chance(p, powers[one], powers[other])

        return [stays] * (count - 1), self._chosen_distribution(p, q, powers, count)

    def _weight_powers(self, p: Vector, q: Vector) -> np.ndarray:
        """The power of 2 that is each token's weight [V]."""
        over, under = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = np.floor(np.log2(over / under))
        most = MAX_WEIGHT_POWER // self.sharpness
        return self.sharpness * np.nan_to_num(found, nan=-most).clip(-most, most).astype(int)

    def _chosen_distribution(self, p: Vector, q: Vector, powers: np.ndarray, count: int) -> Vector:
        """The distribution r [V] of the token that is chosen of `count` drafts."""
        kinds = {power: powers == power for power in np.unique(powers).tolist()}
        drawn = {power: q[where].sum() for power, where in kinds.items()}
        r = q
        for _ in range(1, count):
            before = {power: r[where].sum() for power, where in kinds.items()}
            following = r + q
            for power, where in kinds.items():
                stays = sum(mass * _stay_chance(p, power, other) for other, mass in drawn.items())
                comes = sum(mass * _stay_chance(p, power, other) for other, mass in before.items())
                following[where] = r[where] * stays + q[where] * comes
            r = following
        return r


def _stay_chance(p: Vector, power: int, other: int) -> Any:
    """v / (v + w) of weights 2^power and 2^other, in p's own kind of number."""
    one = p.sum() * 0 + 1
    return one / (one + (one * 2) ** (int(other) - int(power)))


class Transport(SequentialRule):
    """The optimal transport of a node's likeliest tokens and one drawn beside them (Hu et al., 2025).

    The drawn child x, from q' over all but the likeliest, is kept with probability min(1, p(x) / q'(x)). Else a token is drawn
    from max(p - q', 0), normalised, in which the likeliest have all of their p; if it is one of them, that child is kept. So a
    node keeps sum over the likeliest of p + sum of min(p, q') over the rest, and for these drafts no rule keeps more.
    """

    name = "transport"
    lossless = True
    children = ("top_and_sampled",)

    def select_path(self, tree: VerifiedTree, random: RandomSource) -> tuple[list[int], int]:
        path = [0]
        while children := tree.children[path[-1]]:
            node = path[-1]
            p, q = tree.p(node), tree.q(node)
            below = {tree.tokens[child]: child for child in children}
            drawn = next((token for token in below if q[token] > 0), None)
            if drawn is None or not random.flip_coin(acceptance_ratio(p[drawn], q[drawn]), node):
                drawn = random.draw_token(p if drawn is None else normalize_weights((p - q).clip(0), p), node)
            if drawn not in below:
                return path, drawn
            path.append(below[drawn])
        return path, random.draw_token(tree.p(path[-1]), path[-1])

    def acceptance_chances(self, siblings: Siblings, rate: Any = 1) -> list[Any]:
        p, q = siblings.p, siblings.q
        drawn = next((token for token in siblings.tokens if q[token] > 0), None)
        keep = 0 if drawn is None else acceptance_ratio(p[drawn], q[drawn])
        residual = p if drawn is None else normalize_weights((p - q).clip(0), p)
        return [keep + (1 - keep) * residual[x] if x == drawn else (1 - keep) * residual[x] for x in siblings.tokens]


class SpecHub(Transport):
    """SpecHub (Sun et al., 2024): two drafts, one of which is always the hub, the drafter's likeliest token.

    It draws the pairs (x, hub) with chance q(x) and (hub, x) with q(hub) q(x) / (1 - q(hub)), so that x is beside the hub with
    q(x) / (1 - q(hub)): what top_and_sampled draws for two children. Its plan, by a linear programme of that form, gives x
    min(p, that) and the hub the rest of p(hub), which is `Transport`'s; it is that rule, for two drafts alone.
    """

    name = "spechub"

    def select_path(self, tree: VerifiedTree, random: RandomSource) -> tuple[list[int], int]:
        if (most := max(map(len, tree.children))) > 2:
            raise UserError(
                f"acceptance={self.name}: it judges two drafts of a place, and a node of this tree has {most} children; use "
                "tree=cartesian tree.widths=[2,2] or acceptance=transport"
            )
        return super().select_path(tree, random)


def elementwise_min(p: Vector, q: Vector) -> Vector:
    """Return min(p, q), token by token."""
    return p - (p - q).clip(0)
