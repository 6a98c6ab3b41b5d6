"""A server under load, by simulation over measured times: requests arrive at random and are decoded
together.

Requests arrive as a Poisson process. Before every round the server admits those that wait, up to
the largest measured number of texts, and reads their prompts one after the other (continuous
batching). A round then advances all texts: by one token in the time of a step, or by a drawn number
of tokens in the time of a drafted round. Every policy serves the same requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np

from spectrain_studies.axes.points import find_crossover

NUM_REQUESTS = 300
# Arrival rates to simulate, as shares of the largest rate that the server can keep up with.
LOADS = (0.1, 0.25, 0.5, 0.7, 0.85, 1.0, 1.2)


@dataclass(frozen=True)
class TimeTable:
    """Measured times of a server by number of texts that are decoded together, and what a
    request needs.
    """

    # Seconds of a step without a drafter, and of a drafted round.
    step_seconds: dict[int, float]
    round_seconds: dict[int, float]
    # Probability of a drafted round to emit 1, 2, .. tokens.
    round_lengths: dict[int, list[float]]
    # Seconds to read a prompt, which emits the first token.
    prefill_seconds: float
    # Tokens of answers, which requests draw from.
    answer_tokens: Sequence[int]
    # Seconds of a drafted round that drafting takes; {} where they were not measured.
    draft_seconds: dict[int, float] = field(default_factory=dict)
    # For each text, its numbers of rounds that emitted 1, 2, .. tokens; [] where they were not
    # counted.
    text_rounds: Sequence[Sequence[int]] = ()

    @property
    def max_texts(self) -> int:
        return max(self.step_seconds)

    def nearest_lengths(self, num_texts: int) -> list[float]:
        """Return the probabilities of the measured number of texts that is nearest."""
        return self.round_lengths[min(self.round_lengths, key=lambda size: abs(size - num_texts))]

    def mean_round(self, num_texts: int) -> float:
        """Return the mean tokens of a drafted round."""
        return float(
            sum(length * share for length, share in enumerate(self.nearest_lengths(num_texts), 1))
        )

    def interpolate(self, seconds: dict[int, float], num_texts: int) -> float:
        """Return the seconds of a round with so many texts, interpolated linearly between the
        measured numbers.
        """
        sizes = sorted(seconds)
        return float(np.interp(num_texts, sizes, [seconds[size] for size in sizes]))

    def pays(self, num_texts: int) -> bool:
        """Tell whether drafting emits more tokens per second with so many texts."""
        drafted, step = (
            self.interpolate(part, num_texts) for part in (self.round_seconds, self.step_seconds)
        )
        return self.mean_round(num_texts) * step > drafted

    def capacity(self) -> float:
        """Return the requests per second that the server can keep up with, drafting where it
        pays.
        """
        tokens = float(np.mean(self.answer_tokens)) - 1
        rates = []
        for size in self.step_seconds:
            rounds = (
                tokens * self.step_seconds[size],
                tokens / self.mean_round(size) * self.round_seconds[size],
            )
            rates.append(size / max(size * self.prefill_seconds + min(rounds), 1e-12))
        return max(rates)


Policy = Callable[[TimeTable, int], bool]
"""Decides from the number of texts whether a round drafts."""
POLICIES: dict[str, Policy] = {
    "never": lambda table, num_texts: False,
    "always": lambda table, num_texts: True,
    "measured": lambda table, num_texts: table.pays(num_texts),
}


@dataclass
class SimulatedRequest:
    """A request of the simulation."""

    arrival: float
    # Tokens of its answer that are still to come.
    remaining: int
    tokens: int
    first_token: float = 0.0
    finish: float = 0.0
    # Seconds before each token after the first one.
    gaps: list[float] = field(default_factory=list)


Request = TypeVar("Request", bound=SimulatedRequest)


@dataclass(frozen=True)
class LoadPoint:
    """What a server does at one rate of arrivals."""

    # Requests per second that arrive.
    rate: float
    # Tokens per second, of all answers and of those with 95 % of the times between tokens within
    # the bound.
    throughput: float
    goodput: float
    # 95th percentiles, in milliseconds: from the arrival to the first token, and between tokens.
    first_token_ms: float
    between_tokens_ms: float
    # Mean seconds per token of an answer, waiting included.
    seconds_per_token: float
    # Mean number of texts in a round.
    texts: float


def simulate_load(
    table: TimeTable,
    policy: Policy,
    rate: float,
    bound_ms: float = 50.0,
    num_requests: int = NUM_REQUESTS,
    seed: int = 0,
) -> LoadPoint:
    """Simulate requests that arrive at `rate` per second until all are answered."""
    random = np.random.default_rng(seed)
    requests = draw_requests(table, rate, num_requests, random)

    def run_round(active: Sequence[SimulatedRequest]) -> tuple[float, list[int]]:
        drafts = policy(table, len(active))
        times = table.round_seconds if drafts else table.step_seconds
        lengths = table.nearest_lengths(len(active)) if drafts else [1.0]
        draws = 1 + random.choice(len(lengths), len(active), p=lengths)
        return table.interpolate(times, len(active)), draws.tolist()

    num_texts = serve_rounds(table, run_round, requests)
    return summarize_load(requests, rate, bound_ms, num_texts)


def draw_requests(
    table: TimeTable, rate: float, num_requests: int, random: np.random.Generator
) -> list[SimulatedRequest]:
    """Draw requests that arrive at `rate` per second, with the answers of measured texts."""
    arrivals = np.cumsum(random.exponential(1 / rate, num_requests))
    lengths = random.choice(np.asarray(table.answer_tokens), num_requests)
    return [
        SimulatedRequest(float(start), int(count), int(count))
        for start, count in zip(arrivals, lengths)
    ]


def serve_rounds(
    table: TimeTable,
    run_round: Callable[[Sequence[Request]], tuple[float, list[int]]],
    requests: Sequence[Request],
) -> float:
    """Serve requests in the order of their arrival, and return the mean number of texts in a
    round. `run_round` gives the seconds of a round and the tokens that each of its texts gets.
    """
    waiting = deque(requests)
    active = list[Request]()
    clock = 0.0
    sizes: list[int] = []
    while waiting or active:
        if not active and waiting[0].arrival > clock:
            clock = waiting[0].arrival
        while waiting and waiting[0].arrival <= clock and len(active) < table.max_texts:
            request = waiting.popleft()
            clock += table.prefill_seconds
            request.first_token = request.finish = clock
            request.remaining -= 1
            active += [request] if request.remaining > 0 else []
        if not active:
            continue
        seconds, tokens = run_round(active)
        clock += seconds
        sizes.append(len(active))
        for request, emitted in zip(active, tokens):
            count = min(emitted, request.remaining)
            # Other prompts that were read in between delay a text too.
            request.gaps += [clock - request.finish, *[0.0] * (count - 1)]
            request.finish = clock
            request.remaining = request.remaining - count
        active = [request for request in active if request.remaining > 0]
    return float(np.mean(sizes)) if sizes else 0.0


def summarize_load(
    requests: Sequence[SimulatedRequest], rate: float, bound_ms: float, num_texts: float
) -> LoadPoint:
    """Measure how requests were served."""
    seconds = max(request.finish for request in requests) - requests[0].arrival
    gaps = [gap for request in requests for gap in request.gaps]
    late = [sum(gap > bound_ms / 1000 for gap in request.gaps) for request in requests]
    timely = [
        request for request, count in zip(requests, late) if count <= 0.05 * len(request.gaps)
    ]
    return LoadPoint(
        round(rate, 5),
        round(sum(request.tokens for request in requests) / seconds, 3),
        round(sum(request.tokens for request in timely) / seconds, 3),
        round(
            1000
            * float(
                np.percentile([request.first_token - request.arrival for request in requests], 95)
            ),
            3,
        ),
        round(1000 * float(np.percentile(gaps, 95)), 3) if gaps else 0.0,
        float(
            np.mean([(request.finish - request.arrival) / request.tokens for request in requests])
        ),
        round(num_texts, 2),
    )


def simulate_policies(
    table: TimeTable, bound_ms: float, num_requests: int = NUM_REQUESTS
) -> dict[str, Any]:
    """Simulate every policy at several rates of arrivals, for summary.json.

    stop: the rate up to which always drafting takes no more time per token than never drafting,
    waiting included.
    stop_goodput: the rate up to which it has at least the goodput of never drafting.
    """
    rates = [load * table.capacity() for load in LOADS]
    points = {
        name: [simulate_load(table, policy, rate, bound_ms, num_requests) for rate in rates]
        for name, policy in POLICIES.items()
    }
    gains = [
        never.seconds_per_token / always.seconds_per_token
        for never, always in zip(points["never"], points["always"])
    ]
    goods = [
        max(always.goodput, 1e-9) / max(never.goodput, 1e-9)
        for never, always in zip(points["never"], points["always"])
    ]
    return {
        "bound_ms": bound_ms,
        "requests": num_requests,
        "rates": [round(rate, 5) for rate in rates],
        "policies": {name: [asdict(point) for point in line] for name, line in points.items()},
        "stop": asdict(find_crossover(rates, gains)),
        "stop_goodput": asdict(find_crossover(rates, goods)),
        "table": asdict(table),
    }
