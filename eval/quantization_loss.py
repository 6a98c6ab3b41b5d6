"""What rounding a drafter's weights costs: the same prompts decoded with the weights before and
after, in one chain.

Shapes: P prompts.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.eval.intervals import Interval, interval
from spectrain.eval.prompts import read_prompts
from spectrain.models.target import Target
from spectrain.trees import Chain

BATCH_SIZE = 8
"""Prompts that are decoded together."""


@dataclass(frozen=True)
class PairedRate:
    """A number before and after, and their ratio with its interval over the same prompts."""

    before: float
    after: float
    # after / before; None where nothing was accepted before.
    ratio: float | None
    # 95 % interval of the ratio, by draws of prompts that are the same on both sides.
    ci95: Interval


@dataclass(frozen=True)
class QuantizationLoss:
    """The acceptance of a chain before and after, on the same prompts."""

    prompts: int
    max_new_tokens: int
    num_tokens: int  # tokens that a round drafts
    tokens_per_forward: PairedRate
    # Share of all rounds that accept drafted token k + 1, as entry k.
    by_position: list[PairedRate]

    @property
    def loss(self) -> float:
        """The share of the tokens per forward that is lost; negative for a gain."""
        return 1 - (self.tokens_per_forward.ratio or 0.0)

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as an export's spectrain.json holds them."""
        return asdict(self)


def measure_quantization_loss(
    target: Target,
    before: Drafter,
    after: Drafter,
    num_tokens: int,
    num_prompts: int,
    max_new_tokens: int,
) -> QuantizationLoss:
    """Decode held-out prompts greedily with both drafters, in chains of `num_tokens`."""
    prompts = [prompt.tokenize_for(target) for prompt in read_prompts(None, num_prompts).prompts]
    sides = [
        decode_prompts(target, drafter, Chain(num_tokens), prompts, max_new_tokens)
        for drafter in (before, after)
    ]
    return compare_sides(sides[0], sides[1], num_tokens, max_new_tokens)


def compare_sides(
    before: Sequence[Generation],
    after: Sequence[Generation],
    num_tokens: int,
    max_new_tokens: int,
) -> QuantizationLoss:
    """Compare the generations of the same prompts by position."""
    rounds = [[g.complete_round_lengths for g in side] for side in (before, after)]

    def compare(count: Any) -> PairedRate:
        """Compare a count of each prompt's rounds, divided by their number."""
        columns = np.asarray(
            [
                [count(new), len(new), count(old), len(old)]
                for old, new in zip(*rounds, strict=True)
            ],
            dtype=np.float64,
        )
        new, new_rounds, old, old_rounds = columns.sum(0)
        old_rate = float(old / max(1.0, old_rounds))
        new_rate = float(new / max(1.0, new_rounds))
        ratio = round(new_rate / old_rate, 4) if old_rate else None
        ends = interval(columns, (1, -1, -1, 1))
        return PairedRate(round(old_rate, 4), round(new_rate, 4), ratio, ends)

    return QuantizationLoss(
        len(before),
        max_new_tokens,
        num_tokens,
        compare(sum),
        [
            compare(lambda lengths, k=k: sum(length > k for length in lengths))
            for k in range(1, num_tokens + 1)
        ],
    )


def decode_prompts(
    target: Target,
    drafter: Drafter,
    chain: Chain,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
) -> list[Generation]:
    """Decode prompts greedily, some at a time."""
    generations: list[Generation] = []
    for start in range(0, len(prompts), BATCH_SIZE):
        batch = [*prompts[start : start + BATCH_SIZE]]
        generations += decode(target, batch, Greedy(), max_new_tokens, drafter, chain)
    return generations
