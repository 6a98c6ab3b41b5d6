"""What decoding gives, prompt by prompt, and how long its parts took."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import torch

from spectrain.models.device import wait

PARTS = ("draft", "verify", "accept", "other")


@dataclass(frozen=True)
class Line:
    """What one round gave one text."""

    tokens: list[int]
    depth: int  # of the proposal, pruned branches included
    nodes: int  # that the target ran, padding left out
    idle: int  # of these only draft, such as mask tokens
    pruned: int = 0  # further nodes that its first layers ran only, where branches are pruned
    judged: int = 0  # nodes whose children an early exit judged for that


@dataclass
class Generation:
    """What decoding one prompt gave."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)  # EOS included, nothing past it or the limit
    accepted: list[int] = field(default_factory=list)  # tokens emitted in each round, before trimming
    depths: list[int] = field(default_factory=list)  # the other numbers of each round's line
    nodes: list[int] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)
    pruned: list[int] = field(default_factory=list)
    judged: list[int] = field(default_factory=list)
    times: list[dict[str, float]] = field(default_factory=list)  # draft, verify, accept, other of each round of the batch
    cut: bool = False  # EOS or the limit cut the last round short
    done: bool = False
    seconds: dict[str, float] = field(default_factory=dict)  # of the whole batch: the sums of all rounds, and prefill
    batch: int = 1  # prompts decoded together

    def note(self, line: Line, seconds: dict[str, float]) -> None:
        """Add the numbers of a round."""
        self.accepted.append(len(line.tokens))
        self.depths.append(line.depth)
        self.nodes.append(line.nodes)
        self.idle.append(line.idle)
        self.pruned.append(line.pruned)
        self.judged.append(line.judged)
        self.times.append(seconds)

    def emit(self, tokens: list[int], stop_ids: frozenset[int], limit: int) -> None:
        """Add a round's tokens, up to EOS or the limit."""
        for position, token in enumerate(tokens, 1):
            self.output.append(token)
            if token in stop_ids or len(self.output) >= limit:
                self.done, self.cut = True, position < len(tokens)
                return

    @property
    def decode_seconds(self) -> float:
        return sum(value for key, value in self.seconds.items() if key != "prefill")

    @property
    def finish_seconds(self) -> float:
        """Decoding time until this text was done."""
        return sum(sum(times.values()) for times in self.times)

    @property
    def whole_rounds(self) -> list[int]:
        """Tokens a round, without a last round that EOS or the limit cut short."""
        return self.accepted[:-1] if self.cut else self.accepted


Watch = Callable[[list[Generation]], None]
"""Told of the generations of a batch, as they stand after prefill and after every round; what it raises ends the decoding."""


def unwatched(generations: list[Generation]) -> None:
    """Nobody watches."""


Steps = Generator[list[Generation], None, None]
"""A decoding that pauses after prefill and after every look of the host, with the generations as they stand; they are whole,
and timed, when it is over."""


def watched(steps: Steps, watch: Watch) -> list[Generation]:
    """Go through a decoding to its end."""
    generations: list[Generation] = []
    with closing(steps):  # at once where the watcher raises
        for generations in steps:
            watch(generations)
    return generations


def in_turn(decodings: Sequence[Steps]) -> list[list[Generation]]:
    """Decode side by side: whatever has emitted least goes on, so that what slows the machine for a while slows all of them."""
    found = [next(one) for one in decodings]
    left = set(range(len(found)))
    while left:
        least = min(left, key=lambda index: sum(len(one.output) for one in found[index]))
        if next(decodings[least], None) is None:
            left.remove(least)
    return found


class Clock:
    """Wall time of a round by part; on a GPU each part ends with a synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.began = time.perf_counter()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        wait(self.device)
        self.seconds[part] = time.perf_counter() - began

    def lap(self) -> dict[str, float]:
        """The seconds of the round that ends here."""
        now = time.perf_counter()
        seconds = {part: self.seconds.get(part, 0.0) for part in PARTS[:-1]}
        seconds["other"] = now - self.began - sum(seconds.values())
        self.began, self.seconds = now, {}
        return seconds


def timed(generations: list[Generation], prefilled: float) -> None:
    """Note the seconds that a batch took as a whole."""
    longest = max((generation.times for generation in generations), key=len)
    total = {part: sum(times[part] for times in longest) for part in PARTS}
    for generation in generations:
        generation.seconds = {"prefill": prefilled, **total}
