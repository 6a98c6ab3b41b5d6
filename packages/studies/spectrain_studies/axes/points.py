"""The numbers of a drafter at one value of an axis, and the value from which on drafting does not
pay.

A unit is what intervals resample: a prompt where prompts are decoded alone, and a batch where they
share its time. Batches that have a prompt in common are no independent units, so a value with such
batches has no interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any, Literal

import numpy as np

from spectrain.decoding.generation import Generation
from spectrain.eval import metrics
from spectrain.eval.intervals import Interval
from spectrain.eval.metrics import Rates, Turn
from spectrain.eval.user_times import compare_user_times

Axis = Literal["batch", "context", "temperature"]
AXIS_LABELS: dict[str, str] = {
    "batch": "prompts at once",
    "context": "tokens of the prompt",
    "temperature": "temperature",
}
"""Setting eval.sweep -> what stands on the axis of a table and a plot."""
Batch = Sequence[Turn]
"""The turns of the texts that were decoded together."""


@dataclass(frozen=True)
class RoundTimes:
    """Mean seconds of the rounds in which all texts of a batch were decoded, and of their parts."""

    # A step without a drafter, and its forward: T(B, 1).
    step: float
    step_forward: float
    # A drafted round with its drafting, and its forward: T(B, n).
    round: float
    draft: float
    round_forward: float
    # Tokens n of each text in that forward.
    nodes: float

    @property
    def target_efficiency(self) -> float:
        """T(B, 1) / T(B, n): the share of a forward's time that one token of each text needs
        (MoESD, arXiv 2505.19645).
        """
        return self.step_forward / self.round_forward if self.round_forward else 0.0


@dataclass(frozen=True)
class AxisPoint:
    """A drafter at one value of an axis."""

    # Prompts at once, tokens of the prompt, or the temperature.
    value: float
    # Units of the interval.
    units: int
    acceptance_length: float
    speedup: float
    # 95 % interval over units, of drafted and plain runs in pairs; None where units share prompts
    # or are too few.
    ci95: Interval
    predicted: float | None
    # Tokens per second of all texts, and of one text.
    tokens_per_second: Rates
    per_user: Rates
    target_efficiency: float
    # Time of drafting over that of the drafted round's forward.
    draft_share: float
    nodes: float
    # Seconds of a step without a drafter and of a drafted round, with all texts of a batch.
    step_seconds: float
    round_seconds: float
    # Answers that equal those of the same text alone, without a drafter; None where that need not
    # be.
    identical: int | None
    checked: int
    tree: str
    rule: str
    user_times: dict[str, Any]


def mark_units(batches: Sequence[Batch]) -> list[Turn]:
    """Return the turns of all batches, whose ids are those of their units."""
    if all(len(batch) == 1 for batch in batches):
        return [turn for batch in batches for turn in batch]
    return [
        replace(turn, id=f"batch {number:06d}")
        for number, batch in enumerate(batches)
        for turn in batch
    ]


def have_common_prompts(batches: Sequence[Batch]) -> bool:
    """Tell whether a prompt is in several batches; prompts that are decoded alone are units,
    with all their turns.
    """
    if all(len(batch) == 1 for batch in batches):
        return False
    prompts = [prompt for batch in batches for prompt in {turn.id for turn in batch}]
    return len({*prompts}) < len(prompts)


def measure_rounds(batches: Sequence[Batch]) -> RoundTimes:
    """Average the rounds in which every text of its batch was decoded."""
    plain = [
        times
        for batch in batches
        for times in shared_rounds([turn.autoregressive for turn in batch])
    ]
    drafted = [
        times for batch in batches for times in shared_rounds([turn.drafted for turn in batch])
    ]
    nodes = [count for batch in batches for turn in batch for count in turn.drafted.node_counts]

    def average(rounds: Sequence[dict[str, float]], *parts: str) -> float:
        return (
            float(np.mean([sum(times[part] for part in parts or times) for times in rounds]))
            if rounds
            else 0.0
        )

    return RoundTimes(
        average(plain),
        average(plain, "verify"),
        average(drafted),
        average(drafted, "draft"),
        average(drafted, "verify"),
        float(np.mean(nodes)) if nodes else 1.0,
    )


def shared_rounds(generations: Sequence[Generation]) -> list[dict[str, float]]:
    """Return the seconds of the rounds of a batch before its first text was done."""
    return min((generation.round_seconds for generation in generations), key=len)


def compare_rates(
    measure: Callable[[Sequence[Generation]], float],
    plain: Sequence[Generation],
    drafted: Sequence[Generation],
) -> Rates:
    """Return tokens per second without and with the drafter, as `measure` counts them."""
    return Rates(round(measure(plain), 3), round(measure(drafted), 3))


def measure_point(
    value: float,
    batches: Sequence[Batch],
    tree: str,
    rule: str,
    bound_ms: float,
    expected: Sequence[list[int]] | None = None,
) -> AxisPoint:
    """Measure one value of an axis.

    expected: the output of every turn, in the order of the batches, where it must not depend on the
    value.
    """
    turns = mark_units(batches)
    times = measure_rounds(batches)
    plain = [turn.autoregressive for turn in turns]
    drafted = [turn.drafted for turn in turns]
    predicted = metrics.predicted_speedup(turns)
    return AxisPoint(
        value,
        len({turn.id for turn in turns}),
        round(metrics.pooled_acceptance(turns), 4),
        round(metrics.speedup(turns), 4),
        None if have_common_prompts(batches) else metrics.speedup_interval(turns),
        None if predicted is None else round(predicted, 4),
        compare_rates(metrics.tokens_per_second, plain, drafted),
        compare_rates(metrics.per_user_tokens_per_second, plain, drafted),
        round(times.target_efficiency, 4),
        round(times.draft / times.round_forward, 4) if times.round_forward else 0.0,
        round(times.nodes, 2),
        round(times.step, 7),
        round(times.round, 7),
        None
        if expected is None
        else sum(
            turn.drafted.output == output for turn, output in zip(turns, expected, strict=True)
        ),
        len(turns),
        tree,
        rule,
        {"bound_ms": bound_ms, **compare_user_times(turns, bound_ms)},
    )


@dataclass(frozen=True)
class Crossover:
    """Where drafting stops to pay on an axis."""

    # "always" and "never" pays at the measured values; "crosses" pays up to `value`.
    kind: Literal["always", "never", "crosses"]
    # Interpolated between the last measured value that pays and the next one.
    value: float | None = None
    # Largest measured value up to which the lower end of every interval is above 1; None of none.
    certain: float | None = None


def find_crossover(
    values: Sequence[float], speedups: Sequence[float], intervals: Sequence[Interval] | None = None
) -> Crossover:
    """Find the value of an axis after the last measured speedup of at least 1, from which on no
    larger value pays.

    Between two values the logarithm of the speedup is interpolated, over the logarithm of the
    values if both are above 0. A value whose speedup is 0 has no rounds and is left out.
    """
    certain = None
    for value, ends in zip(values, intervals or []):
        if ends is None or ends[0] <= 1:
            break
        certain = value
    measured = [(value, speedup) for value, speedup in zip(values, speedups) if speedup > 0]
    paying = [index for index, (_, speedup) in enumerate(measured) if speedup >= 1]
    if not paying:
        return Crossover("never")
    last = paying[-1]
    if last + 1 == len(measured):
        return Crossover("always", None, certain)
    (low, speedup), (high, next_speedup) = measured[last : last + 2]
    above = log2(speedup)
    below = log2(next_speedup)
    part = above / (above - below)
    value = (
        2 ** (log2(low) + part * (log2(high) - log2(low))) if low > 0 else low + part * (high - low)
    )
    return Crossover("crosses", round(value, 4), certain)
