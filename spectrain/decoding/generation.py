"""What decoding gives, prompt by prompt, and how long its parts took."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import torch

from spectrain.models.device import synchronize_device

ROUND_PARTS = ("draft", "verify", "accept", "other")


@dataclass(frozen=True)
class RoundRecord:
    """What one round gave one text."""

    tokens: list[int]
    depth: int  # of the proposal, pruned branches included
    num_nodes: int  # that the target ran, padding left out
    num_idle: int  # of these only draft, such as mask tokens
    num_pruned: int = 0  # further nodes that its first layers ran only, where branches are pruned
    num_judged: int = 0  # nodes whose children an early exit judged for that


@dataclass
class Generation:
    """What decoding one prompt gave."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)  # EOS included, nothing past it or the limit
    round_lengths: list[int] = field(default_factory=list)  # tokens emitted in each round, before trimming
    depths: list[int] = field(default_factory=list)  # the other numbers of each round's line
    node_counts: list[int] = field(default_factory=list)
    idle_counts: list[int] = field(default_factory=list)
    pruned_counts: list[int] = field(default_factory=list)
    judged_counts: list[int] = field(default_factory=list)
    round_seconds: list[dict[str, float]] = field(
        default_factory=list
    )  # draft, verify, accept, other of each round of the batch
    is_cut: bool = False  # EOS or the limit cut the last round short
    is_done: bool = False
    seconds: dict[str, float] = field(default_factory=dict)  # of the whole batch: the sums of all rounds, and prefill
    batch_size: int = 1  # prompts decoded together

    def record_round(self, record: RoundRecord, seconds: dict[str, float]) -> None:
        """Add the numbers of a round."""
        self.round_lengths.append(len(record.tokens))
        self.depths.append(record.depth)
        self.node_counts.append(record.num_nodes)
        self.idle_counts.append(record.num_idle)
        self.pruned_counts.append(record.num_pruned)
        self.judged_counts.append(record.num_judged)
        self.round_seconds.append(seconds)

    def emit_tokens(self, tokens: list[int], stop_ids: frozenset[int], limit: int) -> None:
        """Add a round's tokens, up to EOS or the limit."""
        for position, token in enumerate(tokens, 1):
            self.output.append(token)
            if token in stop_ids or len(self.output) >= limit:
                self.is_done, self.is_cut = True, position < len(tokens)
                return

    @property
    def decode_seconds(self) -> float:
        return sum(value for key, value in self.seconds.items() if key != "prefill")

    @property
    def finish_seconds(self) -> float:
        """Decoding time until this text was done."""
        return sum(sum(times.values()) for times in self.round_seconds)

    @property
    def complete_round_lengths(self) -> list[int]:
        """Tokens a round, without a last round that EOS or the limit cut short."""
        return self.round_lengths[:-1] if self.is_cut else self.round_lengths


OnRound = Callable[[list[Generation]], None]
"""Told of the generations of a batch, as they stand after prefill and after every round; what it raises ends the decoding."""


def no_callback(generations: list[Generation]) -> None:
    """Nobody watches."""


DecodingSteps = Generator[list[Generation], None, None]
"""A decoding that pauses after prefill and after every look of the host, with the generations as they stand; they are whole,
and timed, when it is over."""


def run_to_end(steps: DecodingSteps, on_round: OnRound) -> list[Generation]:
    """Go through a decoding to its end."""
    generations: list[Generation] = []
    with closing(steps):  # at once where the watcher raises
        for generations in steps:
            on_round(generations)
    return generations


def interleave(decodings: Sequence[DecodingSteps]) -> list[list[Generation]]:
    """Decode side by side: whatever has emitted least goes on, so that what slows the machine for a while slows all of them."""
    found = [next(one) for one in decodings]
    left = set(range(len(found)))
    while left:
        least = min(left, key=lambda index: sum(len(one.output) for one in found[index]))
        if next(decodings[least], None) is None:
            left.remove(least)
    return found


class PartTimer:
    """Wall time of a round by part; on a GPU each part ends with a synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.round_start = time.perf_counter()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        synchronize_device(self.device)
        self.seconds[part] = time.perf_counter() - began

    def finish_round(self) -> dict[str, float]:
        """The seconds of the round that ends here."""
        now = time.perf_counter()
        seconds = {part: self.seconds.get(part, 0.0) for part in ROUND_PARTS[:-1]}
        seconds["other"] = now - self.round_start - sum(seconds.values())
        self.round_start, self.seconds = now, {}
        return seconds


def record_seconds(generations: list[Generation], prefill_seconds: float) -> None:
    """Note the seconds that a batch took as a whole."""
    longest = max((generation.round_seconds for generation in generations), key=len)
    total = {part: sum(times[part] for times in longest) for part in ROUND_PARTS}
    for generation in generations:
        generation.seconds = {"prefill": prefill_seconds, **total}
