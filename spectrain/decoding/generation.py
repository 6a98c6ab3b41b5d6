"""The results of decoding by prompt, and the time of its parts."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from spectrain.models.device import choose_work_clock, synchronize_device
from spectrain.trees.base import RoundPlan

ROUND_PARTS = ("draft", "verify", "accept", "other")


@dataclass(frozen=True)
class RoundRecord:
    """What one round emitted for one text, with the sizes of its tree."""

    tokens: list[int]
    depth: int  # of the tree, pruned branches included
    num_nodes: int  # nodes that the target ran, without padding
    num_idle: int  # mask nodes among them, which only draft
    num_pruned: int = 0  # further nodes that only the first layers ran, because they were pruned
    num_judged: int = 0  # nodes at which an early exit decided what to prune
    # None where rounds are not planned one by one.
    plan: RoundPlan | None = field(default=None, kw_only=True)


@dataclass
class Generation:
    """The decoding of one prompt: its tokens, and lists with one entry per round."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)  # EOS included, nothing past it or the limit
    # tokens emitted in each round, before trimming
    round_lengths: list[int] = field(default_factory=list)
    # this and the next four: the numbers of each round's record
    depths: list[int] = field(default_factory=list)
    node_counts: list[int] = field(default_factory=list)
    idle_counts: list[int] = field(default_factory=list)
    pruned_counts: list[int] = field(default_factory=list)
    judged_counts: list[int] = field(default_factory=list)
    # How each round was planned; None where rounds are not planned one by one.
    plans: list[RoundPlan | None] = field(default_factory=list)
    # Seconds of draft, verify, accept and other in each round of the batch.
    round_seconds: list[dict[str, float]] = field(default_factory=list)
    is_cut: bool = False  # EOS or the limit cut the last round short
    is_done: bool = False
    # of the whole batch: the sums of all rounds, and prefill
    seconds: dict[str, float] = field(default_factory=dict)
    batch_size: int = 1  # prompts decoded together

    def record_round(self, record: RoundRecord, seconds: dict[str, float]) -> None:
        """Append the numbers of a round."""
        self.round_lengths.append(len(record.tokens))
        self.depths.append(record.depth)
        self.node_counts.append(record.num_nodes)
        self.idle_counts.append(record.num_idle)
        self.pruned_counts.append(record.num_pruned)
        self.judged_counts.append(record.num_judged)
        self.plans.append(record.plan)
        self.round_seconds.append(seconds)

    def emit_tokens(self, tokens: list[int], stop_ids: frozenset[int], limit: int) -> None:
        """Append the tokens of a round, up to EOS or the limit."""
        for position, token in enumerate(tokens, 1):
            self.output.append(token)
            if token in stop_ids or len(self.output) >= limit:
                self.is_done = True
                self.is_cut = position < len(tokens)
                return

    @property
    def decode_seconds(self) -> float:
        return sum(value for key, value in self.seconds.items() if key != "prefill")

    @property
    def finish_seconds(self) -> float:
        """Return the seconds of decoding until this text was done."""
        return sum(sum(times.values()) for times in self.round_seconds)

    @property
    def complete_round_lengths(self) -> list[int]:
        """Return the tokens of each round, without a last round that EOS or the limit cut short."""
        return self.round_lengths[:-1] if self.is_cut else self.round_lengths


OnRound = Callable[[list[Generation]], None]
"""Receives the generations of a batch after prefill and after every round. What it raises ends
the decoding.
"""


def no_callback(generations: list[Generation]) -> None:
    """Ignore the generations."""


DecodingSteps = Generator[list[Generation], None, None]
"""A decoding that yields its generations after prefill and after every host synchronization. They
are complete and timed at its end."""


def run_to_end(steps: DecodingSteps, on_round: OnRound) -> list[Generation]:
    """Run a decoding to its end, call `on_round` at every pause, and return the generations."""
    generations: list[Generation] = []
    with closing(steps):  # also where the callback raises
        for generations in steps:
            on_round(generations)
    return generations


def interleave(decodings: Sequence[DecodingSteps]) -> list[list[Generation]]:
    """Interleave decodings: always advance the one with the fewest tokens, so that a slow moment
    affects all of them.
    """
    generations = [next(decoding) for decoding in decodings]
    unfinished = set(range(len(generations)))
    while unfinished:
        shortest = min(
            unfinished,
            key=lambda index: sum(len(decoding.output) for decoding in generations[index]),
        )
        if next(decodings[shortest], None) is None:
            unfinished.remove(shortest)
    return generations


class PartTimer:
    """Measures a round by part: its wall time, and its work by the clock that `choose_work_clock`
    gives.

    On a GPU each part ends with a synchronization.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.clocks = time.perf_counter, choose_work_clock(device)
        # Seconds of each part by both clocks.
        self.parts: dict[str, np.ndarray] = {}
        self.start = self._read_clocks()

    def _read_clocks(self) -> np.ndarray:
        return np.array([clock() for clock in self.clocks])

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = self._read_clocks()
        yield
        synchronize_device(self.device)
        self.parts[part] = self._read_clocks() - start

    def finish_round(self) -> tuple[dict[str, float], dict[str, float]]:
        """End the round and return its seconds by part, those of the wall clock and those of its
        work.
        """
        seconds = {part: self.parts.get(part, np.zeros(2)) for part in ROUND_PARTS[:-1]}
        seconds[ROUND_PARTS[-1]] = self._read_clocks() - self.start - sum(seconds.values())
        wall, work = (
            {part: float(both[clock]) for part, both in seconds.items()} for clock in range(2)
        )
        return wall, work


def record_seconds(generations: list[Generation], prefill_seconds: float) -> None:
    """Record the total seconds of a batch in each of its generations."""
    longest = max((generation.round_seconds for generation in generations), key=len)
    total = {part: sum(times[part] for times in longest) for part in ROUND_PARTS}
    for generation in generations:
        generation.seconds = {"prefill": prefill_seconds, **total}
