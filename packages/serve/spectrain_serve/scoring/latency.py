"""The times of a server's answers at one level of concurrency, and the share of requests within
limits of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from spectrain.errors import UserError
from spectrain.eval.user_times import Percentiles, to_percentiles

from .requests import LevelResult, ServedAnswer
from .rounds import seconds_per_token

DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s)")


@dataclass(frozen=True)
class LatencyLimits:
    """The longest times that a request may take, in seconds; None is no limit."""

    # To the first token.
    ttft: float | None = None
    # Per later token, as the mean of an answer.
    itl: float | None = None

    @classmethod
    def parse(cls, slo: Mapping[str, str] | None) -> LatencyLimits | None:
        """Read eval.slo."""
        if slo is None:
            return None
        if unknown := sorted(slo.keys() - {"ttft", "itl"}):
            raise UserError(
                f"eval.slo.{unknown[0]}: there is no such limit; write {{ttft: 500ms, itl: 50ms}} "
                "or one of them"
            )
        return cls(**{key: parse_seconds(f"eval.slo.{key}", value) for key, value in slo.items()})

    def are_met(self, answer: ServedAnswer) -> bool:
        """Tell whether an answer came within the limits."""
        per_token = seconds_per_token(answer.completion)
        return (self.ttft is None or answer.completion.times.first_token <= self.ttft) and (
            self.itl is None or per_token is None or per_token <= self.itl
        )


def parse_seconds(key: str, value: object) -> float:
    """Return the seconds of a text such as 500ms or 2s."""
    match = DURATION.fullmatch(str(value).strip())
    if match is None:
        raise UserError(f"{key}={value}: give a time with its unit, as in 500ms or 2s")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)


@dataclass(frozen=True)
class ServingTimes:
    """How fast a server answered at one level of concurrency."""

    requests: int
    failed: int
    # From the first request to the last answer.
    seconds: float
    requests_per_second: float
    # Tokens of all answers, the first ones included, over the seconds.
    tokens_per_second: float
    # Time to the first token, waiting included.
    first_token_ms: Percentiles | None
    # Time per later token, the mean of each answer.
    per_token_ms: Percentiles | None
    # Time between two parts of a streamed answer as they arrived; those of a busy server come in
    # bundles.
    chunk_gap_ms: Percentiles | None
    # Whose clock the first two are from.
    clock: Literal["engine", "client"]
    # Share of the requests within eval.slo; None without it.
    within_slo: float | None


def measure_latency(result: LevelResult, limits: LatencyLimits | None) -> ServingTimes:
    """Measure the times of a level; a request that failed is not within the limits."""
    answers = result.successes
    times = [answer.completion.times for answer in answers]
    per_token = [
        value for answer in answers if (value := seconds_per_token(answer.completion)) is not None
    ]
    gaps = [
        after - before
        for each in times
        for (before, _), (after, _) in zip(each.arrivals, each.arrivals[1:])
    ]
    seconds = result.seconds or float("inf")
    within = None if limits is None else sum(map(limits.are_met, answers)) / len(result.answers)
    return ServingTimes(
        len(result.answers),
        len(result.failures),
        round(result.seconds, 4),
        round(len(answers) / seconds, 4),
        round(sum(answer.completion.num_tokens for answer in answers) / seconds, 3),
        to_percentiles([each.first_token for each in times]),
        to_percentiles(per_token),
        to_percentiles(gaps),
        "engine" if any(each.engine_per_token is not None for each in times) else "client",
        None if within is None else round(within, 4),
    )
