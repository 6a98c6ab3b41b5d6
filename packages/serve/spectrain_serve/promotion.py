"""The proof of promotion: a continued drafter against the one in use, on the same prompts, with
intervals, and the rule that decides.

Both decode every prompt in this project's engine by the same chain and the same rule. The compared
value is tokens per forward. Shapes: P prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.eval.intervals import Interval, interval
from spectrain.models.target import Target
from spectrain.trees import Chain

SIGNS = (1, -1, -1, 1)
LEAST_PROMPTS = 8
"""Fewest prompts of a comparison that decides anything."""


@dataclass(frozen=True)
class PairedGain:
    """Tokens per forward of the candidate over those of the serving drafter, on the same
    prompts.
    """

    num_prompts: int
    serving: float
    candidate: float
    # Relative gain, -0.02 for a loss of 2 %, with its 95 % interval; None where there are too few
    # prompts.
    gain: float
    interval: Interval
    # Answers of both that are equal, which all should be.
    num_equal: int

    @property
    def low(self) -> float:
        """Return the lower end of the interval, or minus infinity without one."""
        return float("-inf") if self.interval is None else self.interval[0]


@dataclass(frozen=True)
class PromotionProof:
    """Whether a candidate is promoted, and why. `old` is None where no earlier traffic is
    compared.
    """

    new: PairedGain
    old: PairedGain | None
    is_promoted: bool
    reason: str


def decide_promotion(
    new: PairedGain, old: PairedGain | None = None, tolerance: float = 0.0
) -> PromotionProof:
    """Promote a candidate only if new traffic gains with its lower bound above 0, and the lower
    bound of old traffic, where it is compared, is above minus the tolerance."""
    reason = find_objection(new, old, tolerance)
    if reason is not None:
        return PromotionProof(new, old, False, reason)
    comparison = "" if old is None else f"; old has {old.gain:+.1%}"
    return PromotionProof(
        new, old, True, f"new traffic gains {new.gain:+.1%}, at least {new.low:+.1%}{comparison}"
    )


def find_objection(new: PairedGain, old: PairedGain | None, tolerance: float) -> str | None:
    """Return why a candidate is not promoted; None where nothing speaks against it."""
    if min(gain.num_prompts for gain in (new, old) if gain is not None) < LEAST_PROMPTS:
        number = f"{new.num_prompts} new" + ("" if old is None else f" and {old.num_prompts} old")
        return f"too few prompts: {number}, and {LEAST_PROMPTS} are needed"
    if not new.low > 0:
        return (
            f"the gain on new traffic, {new.gain:+.1%}, is not certain: its interval begins "
            f"at {new.low:+.1%}"
        )
    if old is not None and not old.low > -tolerance:
        return (
            f"old traffic may lose {-old.low:.1%} ({old.gain:+.1%}), which is more than the "
            f"tolerance of {tolerance:.1%}"
        )
    if new.num_equal < new.num_prompts // 2:
        return (
            f"only {new.num_equal} of {new.num_prompts} answers are equal, so the target does "
            "not verify the drafts"
        )
    return None


def compare_rounds(serving: Sequence[Generation], candidate: Sequence[Generation]) -> PairedGain:
    """Compare the decodings of the same prompts by two drafters."""
    columns = np.array(
        [[*count_tokens(new), *count_tokens(old)] for old, new in zip(serving, candidate)],
        dtype=np.float64,
    )
    columns = columns.reshape(-1, 4)
    sums = columns.sum(0)
    num_equal = sum(old.output == new.output for old, new in zip(serving, candidate))
    if not sums.all():
        return PairedGain(len(columns), 0.0, 0.0, 0.0, None, num_equal)
    ratio = interval(columns, SIGNS)
    old_rate = sums[2] / sums[3]
    new_rate = sums[0] / sums[1]
    ends = None if ratio is None else [round(end - 1, 4) for end in ratio]
    return PairedGain(
        len(columns),
        float(old_rate),
        float(new_rate),
        float(new_rate / old_rate - 1),
        ends,
        num_equal,
    )


def count_tokens(generation: Generation) -> tuple[int, int]:
    """Return the tokens that the rounds of an answer emitted, and the number of rounds."""
    return sum(generation.round_lengths), len(generation.round_lengths)


def decode_prompts(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    rule: AcceptanceRule,
    depth: int,
    limit: int,
) -> list[Generation]:
    """Decode up to `limit` new tokens of every prompt, each by itself as a server does, with
    chains of `depth` drafts. The number of a prompt keys its random draws.
    """
    builder = Chain(depth)
    return [
        decode(
            target,
            [prompt],
            rule,
            max(2, min(limit, target.max_length - len(prompt) - 1)),
            drafter,
            builder,
            [number],
        )[0]
        for number, prompt in enumerate(prompts)
    ]
