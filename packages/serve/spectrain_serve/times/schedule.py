"""How many tokens to draft with how many texts at once, by the measured times of a sweep over batch
sizes: the schedule that an engine reads.

The sweep measures steps without a drafter and rounds with K draft tokens. A round with k tokens is
taken to last in between, because each token adds a draft step and a row of the target's forward:
step + (round - step) k / K. It emits what the measured rounds would have emitted, cut to k accepted
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, groupby
from typing import Any

from . import load
from .load import NUM_REQUESTS, POLICIES, TimeTable, simulate_load, simulate_policies
from .request_lengths import simulate_request_lengths


def make_schedule(table: TimeTable, num_tokens: int) -> list[int]:
    """Return the draft tokens that give most tokens per second with 1, 2, .. texts, from 0 to
    `num_tokens`."""
    return [
        choose_length(table, num_texts, num_tokens) for num_texts in range(1, table.max_texts + 1)
    ]


def choose_length(table: TimeTable, num_texts: int, num_tokens: int) -> int:
    """Return the draft tokens that give most tokens per second; of equals the fewest."""

    def rate(length: int) -> float:
        emitted = sum(
            count * share
            for count, share in enumerate(cut_lengths(table, num_texts, length), start=1)
        )
        return emitted / max(estimate_seconds(table, num_texts, length, num_tokens), 1e-12)

    return max(range(num_tokens + 1), key=rate)


def estimate_seconds(table: TimeTable, num_texts: int, length: int, num_tokens: int) -> float:
    """Return the seconds of a round that drafts `length` tokens, between a step and a measured
    round of `num_tokens`."""
    step = table.interpolate(table.step_seconds, num_texts)
    round_seconds = table.interpolate(table.round_seconds, num_texts)
    return step + (round_seconds - step) * length / num_tokens


def cut_lengths(table: TimeTable, num_texts: int, length: int) -> list[float]:
    """Return the probabilities of a round with `length` draft tokens to emit 1, 2, .. tokens."""
    shares = table.nearest_lengths(num_texts)
    return [*shares[:length], sum(shares[length:])]


def apply_lengths(table: TimeTable, lengths: Sequence[int], num_tokens: int) -> TimeTable:
    """Return the times of rounds that draft `lengths[n - 1]` tokens with n texts."""
    by_texts = dict(enumerate(lengths, start=1))
    return replace(
        table,
        round_seconds={
            num_texts: estimate_seconds(table, num_texts, length, num_tokens)
            for num_texts, length in by_texts.items()
        },
        round_lengths={
            num_texts: cut_lengths(table, num_texts, length)
            for num_texts, length in by_texts.items()
        },
    )


def list_ranges(lengths: Sequence[int]) -> list[list[int]]:
    """Return the ranges of equal lengths, as [first number of texts, last one, draft tokens]:
    vLLM's `num_speculative_tokens_per_batch_size`."""
    ranges = []
    first = 1
    for length, group in groupby(lengths):
        last = first + len([*group]) - 1
        ranges.append([first, last, length])
        first = last + 1
    return ranges


def list_costs(table: TimeTable, num_tokens: int) -> dict[str, Any] | None:
    """Return the rounds per second of the target by the number of tokens in its forward, in the
    form that SGLang's DSpark reads; None where the time of drafting was not measured.

    A step of n texts has n tokens in its forward, a round with `num_tokens` draft tokens n times
    one more. Drafting does not count. More tokens never take less time.
    """
    if not table.draft_seconds:
        return None
    seconds = {num_texts: table.step_seconds[num_texts] for num_texts in table.step_seconds}
    for num_texts, round_seconds in table.round_seconds.items():
        verified = num_texts * (1 + num_tokens)
        seconds.setdefault(verified, round_seconds - table.draft_seconds[num_texts])
    sizes = sorted(seconds)
    slowest = [*accumulate((seconds[size] for size in sizes), max)]
    return {
        "sample_batch_tokens": sizes,
        "sample_steps_per_sec": [round(1 / max(value, 1e-9), 3) for value in slowest],
        "max_batch_tokens": sizes[-1],
    }


def simulate_schedule(
    table: TimeTable, num_tokens: int, bound_ms: float, num_requests: int = NUM_REQUESTS
) -> dict[str, Any]:
    """Serve the same requests by the schedule and with `num_tokens` in every round, for
    summary.json.

    gains: seconds per token, waiting included, of the fixed length over those of the schedule, by
    rate of arrivals.
    """
    lengths = make_schedule(table, num_tokens)
    rates = [share * table.capacity() for share in load.LOADS]
    fixed, scheduled = (
        [
            simulate_load(
                apply_lengths(table, by_texts, num_tokens),
                POLICIES["always"],
                rate,
                bound_ms,
                num_requests,
            )
            for rate in rates
        ]
        for by_texts in ([num_tokens] * table.max_texts, lengths)
    )
    return {
        "num_tokens": num_tokens,
        "ranges": list_ranges(lengths),
        "rates": [round(rate, 5) for rate in rates],
        "gains": [
            round(before.seconds_per_token / after.seconds_per_token, 4)
            for before, after in zip(fixed, scheduled)
        ],
        "fixed": [asdict(point) for point in fixed],
        "scheduled": [asdict(point) for point in scheduled],
        "costs": list_costs(table, num_tokens),
    }


def simulate_server(
    times: Mapping[str, Any], bound_ms: float, num_tokens: int | None
) -> dict[str, Any]:
    """Return the entry `load` of a sweep over batch sizes: a server with these times under load
    and, for a drafter of chains of `num_tokens`, the schedule of its draft tokens, and what lengths
    by request gain.
    """
    table = TimeTable(**times)
    entry = simulate_policies(table, bound_ms)
    if num_tokens is not None:
        entry["schedule"] = simulate_schedule(table, num_tokens, bound_ms)
        if table.text_rounds:
            entry["request_lengths"] = simulate_request_lengths(table, num_tokens, bound_ms)
    return entry
