"""Rules for several drafts of one position, each a plan that transports drafts to the target's p. V
vocabulary.

Verifying a node is a transport problem: as much of the drafts as possible should be transported to
p. `optimum.py` computes how much any rule could accept. These rules differ in how close they come
and in the kinds of drafts that they support.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
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

# the probability that a chosen token stays when it meets another one
StayChance = Callable[[int, int], Any]
BISECTION_STEPS = 24  # bisections of K-SEQ's division factor: exact to a sixteen-millionth
MAX_WEIGHT_POWER = 20  # a token's weight is between 2 to minus this power and 2 to this power


class KSeq(SequentialRule):
    """K-SEQ (SpecTr, Sun et al., 2023, algorithm 2): k independent drafts in turn, each compared
    with p divided by rho.

    Draft x is accepted with probability min(1, p(x) / (rho q(x))), so each draft is accepted with
    beta = sum min(q, p / rho) if no earlier one was. rho is the smallest with which k drafts accept
    no more than p allows, 1 - (1 - beta)^k = rho beta. If none is accepted, the token is drawn from
    p - min(q, p / rho) (1 - (1 - beta)^k) / beta, normalised.
    """

    name = "kseq"
    lossless = True
    children = ("sampled",)

    def select_path(self, tree: VerifiedTree, random: RandomSource) -> tuple[list[int], int]:
        path = [0]
        while children := tree.children[path[-1]]:
            node = path[-1]
            p = tree.p(node)
            q = tree.q(node)
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
        p = siblings.p
        q = siblings.q
        open_chance = 1
        chances = []
        rho = solve_divisor(p, q, len(siblings.tokens))
        for token in siblings.tokens:
            accept_chance = acceptance_ratio(p[token], rho * q[token])
            chances.append(open_chance * accept_chance)
            open_chance = open_chance * (1 - accept_chance)
        return chances


def solve_divisor(p: Vector, q: Vector, count: int) -> Any:
    """Return K-SEQ's rho for `count` drafts, from 1 to `count`, rounded up: larger values are
    lossless too.
    """
    # in the number type of p
    low = p.sum() * 0 + 1
    high = p.sum() * 0 + count
    for _ in range(BISECTION_STEPS if count > 1 else 0):
        middle = (low + high) / 2
        beta = elementwise_min(q, p / middle).sum()
        low, high = (low, middle) if 1 - (1 - beta) ** count <= middle * beta else (middle, high)
    return high


def _kseq_residual(p: Vector, q: Vector, rho: Any, count: int) -> Vector:
    """Return the distribution from which the token is drawn where K-SEQ accepts no draft."""
    accepted = elementwise_min(q, p / rho)
    beta = accepted.sum()
    return (
        normalize_weights((p - accepted * ((1 - (1 - beta) ** count) / beta)).clip(0), p)
        if beta > 0
        else p
    )


class Tournament(SequentialRule):
    """Chooses one of k independent drafts and verifies it as a single draft (Khisti et al., 2024,
    section 3).

    Any choice is lossless if the distribution r of the chosen token is known: it is accepted with
    probability min(1, p / r), otherwise the token is drawn from max(p - r, 0), normalised. Here
    drafts meet one after another, and the one chosen so far stays with a probability that depends
    on the two tokens; r follows from these probabilities exactly.
    """

    lossless = True
    children = ("sampled",)

    @abstractmethod
    def _stay_chances(self, p: Vector, q: Vector, count: int) -> tuple[list[StayChance], Vector]:
        """Return, for each draft after the first, the probability that the token chosen so far
        stays, and r [V].
        """

    def select_path(self, tree: VerifiedTree, random: RandomSource) -> tuple[list[int], int]:
        path = [0]
        while children := tree.children[path[-1]]:
            node = path[-1]
            chosen = children[0]
            p = tree.p(node)
            q = tree.q(node)
            duels, r = self._stay_chances(p, q, len(children))
            for number, (child, stays) in enumerate(zip(children[1:], duels), 1):
                if not random.flip_coin(
                    stays(tree.tokens[chosen], tree.tokens[child]), node, number
                ):
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
        for index, (token, duel) in enumerate(zip(tokens[1:], duels), 1):
            stays = [duel(earlier, token) for earlier in tokens[:index]]
            chosen.append(sum(chance * (1 - stay) for chance, stay in zip(chosen, stays)))
            chosen[:-1] = [chance * stay for chance, stay in zip(chosen, stays)]
        return [
            chance * acceptance_ratio(p[token], r[token]) for chance, token in zip(chosen, tokens)
        ]


@dataclass(eq=False)
class ImportanceSampling(Tournament):
    """Importance-sampled choice (Khisti et al., 2024, section 4).

    Of two drafts with weights v and w the first stays with probability v / (v + w). The weight is
    (p / q)^sharpness, with p / q rounded down to a power of 2, so that r needs sums over weights
    instead of pairs of tokens.
    """

    name = "importance"

    # Exponent of the importance weights p / q; larger values prefer more strongly what the
    # target prefers.
    sharpness: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.sharpness <= MAX_WEIGHT_POWER:
            raise UserError(
                f"acceptance.sharpness={self.sharpness}: use 1 to {MAX_WEIGHT_POWER}; larger "
                "values give all drafts equal weights"
            )

    def _stay_chances(self, p: Vector, q: Vector, count: int) -> tuple[list[StayChance], Vector]:
        powers = self._weight_powers(p, q)

        def stays(token: int, other: int) -> Any:
            return _stay_chance(p, powers[token], powers[other])

        return [stays] * (count - 1), self._chosen_distribution(p, q, powers, count)

    def _weight_powers(self, p: Vector, q: Vector) -> np.ndarray:
        """Return the exponents [V] of the tokens' weights, which are powers of 2."""
        p_array = np.asarray(p, dtype=np.float64)
        q_array = np.asarray(q, dtype=np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            powers = np.floor(np.log2(p_array / q_array))
        largest = MAX_WEIGHT_POWER // self.sharpness
        return self.sharpness * np.nan_to_num(powers, nan=-largest).clip(-largest, largest).astype(
            int
        )

    def _chosen_distribution(self, p: Vector, q: Vector, powers: np.ndarray, count: int) -> Vector:
        """Return the distribution r [V] of the token that is chosen among `count` drafts."""
        kinds = {power: powers == power for power in np.unique(powers).tolist()}
        drawn = {power: q[mask].sum() for power, mask in kinds.items()}
        r = q
        for _ in range(1, count):
            before = {power: r[mask].sum() for power, mask in kinds.items()}
            following = r + q
            for power, mask in kinds.items():
                stays = sum(mass * _stay_chance(p, power, other) for other, mass in drawn.items())
                comes = sum(mass * _stay_chance(p, power, other) for other, mass in before.items())
                following[mask] = r[mask] * stays + q[mask] * comes
            r = following
        return r


def _stay_chance(p: Vector, power: int, other: int) -> Any:
    """Return v / (v + w) of weights 2^power and 2^other, in the number type of p."""
    unit = p.sum() * 0 + 1
    return unit / (unit + (unit * 2) ** (int(other) - int(power)))


class Transport(SequentialRule):
    """The optimal transport of a node's most likely tokens and one drawn token (Hu et al., 2025).

    The drawn child x, from q' over all other tokens, is accepted with probability min(1, p(x) /
    q'(x)). Otherwise a token is drawn from max(p - q', 0), normalised, in which the most likely
    tokens keep all of their p; if it is one of them, that child is accepted. So a node accepts with
    the sum of p over the most likely tokens plus the sum of min(p, q') over the others, which no
    rule exceeds for these drafts.
    """

    name = "transport"
    lossless = True
    children = ("top_and_sampled",)

    def select_path(self, tree: VerifiedTree, random: RandomSource) -> tuple[list[int], int]:
        path = [0]
        while children := tree.children[path[-1]]:
            node = path[-1]
            p = tree.p(node)
            q = tree.q(node)
            below = {tree.tokens[child]: child for child in children}
            drawn = next((token for token in below if q[token] > 0), None)
            if drawn is None or not random.flip_coin(acceptance_ratio(p[drawn], q[drawn]), node):
                drawn = random.draw_token(
                    p if drawn is None else normalize_weights((p - q).clip(0), p), node
                )
            if drawn not in below:
                return path, drawn
            path.append(below[drawn])
        return path, random.draw_token(tree.p(path[-1]), path[-1])

    def acceptance_chances(self, siblings: Siblings, rate: Any = 1) -> list[Any]:
        p, q = siblings.p, siblings.q
        drawn = next((token for token in siblings.tokens if q[token] > 0), None)
        keep = 0 if drawn is None else acceptance_ratio(p[drawn], q[drawn])
        residual = p if drawn is None else normalize_weights((p - q).clip(0), p)
        return [
            keep + (1 - keep) * residual[x] if x == drawn else (1 - keep) * residual[x]
            for x in siblings.tokens
        ]


class SpecHub(Transport):
    """SpecHub (Sun et al., 2024): two drafts, one of which is always the hub, the drafter's most
    likely token.

    It draws the pair (x, hub) with probability q(x) and (hub, x) with q(hub) q(x) / (1 - q(hub)),
    so x accompanies the hub with q(x) / (1 - q(hub)), as top_and_sampled draws it for two children.
    Its linear program gives x min(p, q(x) / (1 - q(hub))) and the hub the rest of p(hub), which is
    `Transport`: it is that rule, for two drafts only.
    """

    name = "spechub"

    def select_path(self, tree: VerifiedTree, random: RandomSource) -> tuple[list[int], int]:
        if (num_children := max(map(len, tree.children))) > 2:
            raise UserError(
                f"acceptance={self.name}: it verifies two drafts per node, and a node has "
                f"{num_children} children; use tree=cartesian tree.widths=[2,2] or "
                "acceptance=transport"
            )
        return super().select_path(tree, random)


def elementwise_min(p: Vector, q: Vector) -> Vector:
    """Return min(p, q), token by token."""
    return p - (p - q).clip(0)
