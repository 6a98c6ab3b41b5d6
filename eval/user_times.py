"""What a reader of an answer waits for: the time to its first token and the times between its
tokens.

All tokens of a round arrive together, at its end: the first of them after the seconds of the round,
the others at once. The first token of an answer comes with the prefill. Times are those of the
recorded rounds, so they are known for decoding with a drafter and without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from spectrain.decoding.generation import Generation
from spectrain.eval.columns import Column, list_systems, percentile_column
from spectrain.eval.metrics import Turn


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of times, in milliseconds."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class UserTimes:
    """The times of all answers of a system, as their readers see them."""

    # From the request to the first token: the prefill of the batch.
    first_token_ms: Percentiles | None
    # From one token to the next one of the same answer.
    between_tokens_ms: Percentiles | None
    # Share of the times between tokens that are at most eval.bound_ms.
    within_bound: float | None
    # Tokens per second of the answers whose 95th percentile of these times is within the bound,
    # over the time of all answers.
    goodput: float | None


def to_percentiles(seconds: Sequence[float]) -> Percentiles | None:
    """Return percentiles of seconds, in milliseconds; None of nothing."""
    if not len(seconds):
        return None
    p50, p95, p99 = (
        round(1000 * float(value), 3) for value in np.percentile(seconds, [50, 95, 99])
    )
    return Percentiles(p50, p95, p99)


def token_gaps(generation: Generation) -> list[float]:
    """Return the seconds before each token of an answer after its first one, in order; tokens
    after its end are left out.
    """
    gaps: list[float] = []
    for length, times in zip(generation.round_lengths, generation.round_seconds):
        gaps += [sum(times.values()), *[0.0] * (length - 1)]
    return gaps[: len(generation.output) - 1]


def measure_user_times(generations: Sequence[Generation], bound_ms: float) -> UserTimes:
    """Measure the times of answers, whose goodput counts those within the bound, in
    milliseconds.
    """
    gaps = [token_gaps(generation) for generation in generations]
    joined = np.concatenate([np.asarray(part) for part in gaps]) if gaps else np.zeros(0)
    bound = bound_ms / 1000
    seconds = sum(generation.decode_seconds / generation.batch_size for generation in generations)
    timely = sum(len(part) for part in gaps if part and np.percentile(part, 95) <= bound)
    return UserTimes(
        to_percentiles(
            [
                generation.seconds["prefill"]
                for generation in generations
                if "prefill" in generation.seconds
            ]
        ),
        to_percentiles(joined),  # type: ignore[arg-type]
        round(float(np.mean(joined <= bound)), 4) if len(joined) else None,
        round(timely / seconds, 3) if seconds else None,
    )


def compare_user_times(turns: Sequence[Turn], bound_ms: float) -> dict[str, Any]:
    """Return the times without the drafter (plain) and with it (drafted), for summary.json."""
    runs = {
        "plain": [turn.autoregressive for turn in turns],
        "drafted": [turn.drafted for turn in turns],
    }
    return {
        name: asdict(measure_user_times(generations, bound_ms))
        for name, generations in runs.items()
    }


USER_TIME_COLUMNS = (
    percentile_column(
        "user_times.drafted.first_token_ms",
        "ms to the first token",
        "Milliseconds to read the prompt and emit the first token",
    ),
    percentile_column(
        "user_times.drafted.between_tokens_ms",
        "ms between tokens",
        "Milliseconds from a token to the next; those of a round are 0",
    ),
    Column(
        "user_times.drafted.within_bound",
        "within eval.bound_ms",
        lambda share: f"{share:.1%}",
        "Share of the times between tokens that are at most eval.bound_ms.",
    ),
    Column(
        "user_times.drafted.goodput",
        "goodput, tokens/s",
        lambda rate: f"{rate:.1f}",
        "Tokens per second of answers whose 95th percentile of the time between tokens is within "
        "eval.bound_ms.",
    ),
)
"""Columns of the times that a reader sees."""


def list_user_time_rows(summary: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the labels and entries of the times that a reader sees: of decoding without a
    drafter, then of every system.
    """
    entries = [entry for entry in list_systems(summary).values() if entry.get("user_times")]
    plain = [
        ("autoregressive", {"user_times": {"drafted": entry["user_times"]["plain"]}})
        for entry in entries[:1]
    ]
    return [*plain, *((entry["label"], entry) for entry in entries)]


def describe_user_times(entry: Mapping[str, Any]) -> str:
    """Say in one sentence what a reader waits for, without the drafter and with it."""
    times = entry["user_times"]
    cells = {
        name: [
            column.cell({"user_times": {"drafted": times[name]}}) for column in USER_TIME_COLUMNS
        ]
        for name in ("plain", "drafted")
    }
    (first, gaps, share, _), (drafted_first, drafted_gaps, drafted_share, _) = (
        cells["plain"],
        cells["drafted"],
    )
    return (
        f"Milliseconds between tokens (percentiles 50 / 95 / 99): {gaps} without the drafter, "
        f"{drafted_gaps} with it; within {times['bound_ms']:g} ms: {share} and {drafted_share}. "
        f"To the first token: {first} and {drafted_first}."
    )
