"""Drawing continuations without replacement, with the help of drafts. Shapes: C candidates.

The functions run on tensors and, in a proof, on numpy arrays of fractions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.acceptance.base import Vector
from spectrain.decoding.acceptance.sequential import (
    RandomSource,
    acceptance_ratio,
    normalize_weights,
    remove_token,
)


def draw_candidates(
    p: Vector, q: Vector, drafts: Sequence[int], count: int, random: RandomSource
) -> list[int]:
    """Draw up to `count` candidates from p [C] without replacement, in the order of the draw.

    `drafts` were drawn from q [C] without replacement, in this order. Each draw judges the next
    drafts by recursive rejection, with p without the candidates drawn before and q without the
    drafts judged before, until a draft is accepted; without one it draws from what the rejected
    drafts leave of p. A draft is judged once. So every draw has the distribution p of the
    candidates that remain, whatever q is.
    """
    waiting = list(drafts)
    drawn = list[int]()
    while len(drawn) < count and p.sum() > 0:
        residual = p
        candidate = None
        while waiting and candidate is None:
            draft = waiting.pop(0)
            if random.flip_coin(
                acceptance_ratio(residual[draft], q[draft]), len(drawn), len(waiting)
            ):
                candidate = draft
            residual = normalize_weights((residual - q).clip(0), residual)
            q = remove_token(q, draft)
        if candidate is None:
            candidate = random.draw_token(residual, len(drawn))
        drawn.append(candidate)
        p = remove_token(p, candidate)
    return drawn


def choose_width(p: Vector, q: Vector, num_drafts: int, most: int, threshold: Any) -> int:
    """Return the largest number of beams, at most `most`, of which so many drafts are accepted with
    a chance of `threshold`.

    Every draft counts as accepted with the chance sum min(p, q), independently of the others (DSBD,
    Qin et al., 2025). The number depends on p, q and a setting, not on the drafts, so that beams of
    this number are drawn exactly.
    """
    rate = sum(min(a, b) for a, b in zip(p.tolist(), q.tolist()))
    tail = 0
    width = 1
    for size in range(num_drafts, 0, -1):
        tail = tail + comb(num_drafts, size) * rate**size * (1 - rate) ** (num_drafts - size)
        if size <= most and tail >= threshold:
            return max(width, size)
    return width


class GeneratorSource:
    """The source of random outcomes of a text: a generator with a fixed seed."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def flip_coin(self, chance: Any, node: int, number: int = 0) -> bool:
        return float(torch.rand((), generator=self.generator, dtype=torch.float64)) < float(chance)

    def draw_token(self, weights: Vector, node: int) -> int:
        return int(torch.multinomial(weights, 1, generator=self.generator))


DraftOffer = Callable[[], tuple[Tensor, list[int]]]
"""Returns q [C] of a step and the drafts that were drawn from it."""


@dataclass(frozen=True)
class WidthLimit:
    """How a dynamic width is chosen."""

    # Chance with which as many drafts as beams have to be accepted.
    threshold: float
    # Drafts of a depth over all beams. How many of them follow the beams that go on is no function
    # of p and q, so it is not used.
    num_drafts: int


def make_chooser(
    temperature: float,
    count: int,
    random: RandomSource,
    offer: DraftOffer,
    limit: WidthLimit | None,
) -> Callable[[Tensor], Tensor]:
    """Make what draws a step's candidates from accumulated log-probabilities [C]; `offer` returns q
    and the drafts.

    With a `limit`, `choose_width` says how many are drawn, `count` at most; where nothing was
    drafted, all of them.
    """

    def choose(totals: Tensor) -> Tensor:
        p = (totals.double() / temperature).softmax(-1)
        q, drafts = offer()
        is_limited = limit is not None and bool(q.sum() > 0)
        width = (
            choose_width(p, q, limit.num_drafts, count, limit.threshold)
            if limit is not None and is_limited
            else count
        )
        return torch.tensor(draw_candidates(p, q, drafts, width, random))

    return choose
