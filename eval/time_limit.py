"""A limit of the time that a score takes: what fits into it, when enough prompts are timed, and
the line that shows its progress.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spectrain.eval.metrics import Turn
from spectrain.eval.noise import ENOUGH
from spectrain.output.console import make_console
from spectrain.output.progress_line import ProgressLine

# Prompts that are timed even if the time runs out before.
MIN_PROMPTS = 4
# What follows decoding, in runs of one prompt by one system: the reference of each prompt, and
# memory, drafts and page.
CHECK_RUNS = 1.5
REPORT_RUNS = 9.0
# Share of the time in which prompts are counted, where the machine is too slow to count all.
COUNT_SHARE = 0.7
# Evidence at which a speedup is decided: 1 / 0.05, an error of 5 % however often it is looked at.
DECIDED = 20.0


@dataclass
class TimeLimit:
    """The time of a score, which begins when this is constructed."""

    minutes: float
    # Whether outputs are checked and a report is written after decoding.
    checks: bool = True
    reports: bool = True
    # How often a pair may be decoded.
    repeats: int = 2
    clock: Callable[[], float] = time.perf_counter
    end: float = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.clock() + 60 * self.minutes

    def allows_counting(self) -> bool:
        """Tell whether time is left for counting the tokens of more prompts."""
        return self.end - self.clock() > 60 * self.minutes * (1 - COUNT_SHARE)

    def seconds_left(self, num_prompts: int, run_seconds: float) -> float:
        """Return the seconds left for decoding, if so many prompts are checked then; a run of
        one takes `run_seconds`.
        """
        return (
            self.end
            - self.clock()
            - run_seconds * (CHECK_RUNS * num_prompts * self.checks + REPORT_RUNS * self.reports)
        )


def is_decided(turns: Sequence[Turn]) -> bool:
    """Tell whether enough pairs are timed to say that drafting is faster, or that it is slower."""
    ratios = [
        math.log(
            turn.autoregressive.decode_seconds
            / len(turn.autoregressive.output)
            / (turn.drafted.decode_seconds / len(turn.drafted.output))
        )
        for turn in turns
        if turn.autoregressive.decode_seconds > 0 and turn.drafted.decode_seconds > 0
    ]
    return len(ratios) >= ENOUGH and sequential_evidence(ratios) >= DECIDED


def sequential_evidence(values: Sequence[float]) -> float:
    """Return the evidence against a mean of 0 of normal values: the likelihood ratio of a mixture
    over effect sizes, N(0, 1), to no effect, both with the prior 1/sigma.

    It exceeds 1/a with a probability of at most a, at any number of values and however often it is
    looked at (the t-test of Lai, 1976, as a test martingale: Wang and Ramdas, 2023).
    """
    count = len(values)
    total = sum(values)
    squares = sum(value * value for value in values)
    if squares == 0:
        return 0.0
    rest = squares - total * total / (count + 1)
    return math.exp(0.5 * count * math.log(squares / rest) - 0.5 * math.log(count + 1))


class ScoreProgress:
    """The progress of a score on a terminal: what it does, and the time left, by its limit or by
    what is done already.
    """

    def __init__(self, limit: TimeLimit | None = None) -> None:
        self.limit = limit
        self.text = "begins"
        self.total = 0
        total = None if limit is None else 60 * limit.minutes
        self.line = ProgressLine("scoring", total, make_console(stderr=True))

    def begin(self, text: str, total: int = 0) -> None:
        """Begin a part of the score, of so many units where they are counted."""
        self.text = text
        self.total = total
        if self.limit is None:
            self.line.restart(total or None)
        self.show(0)

    def show(self, done: int) -> None:
        """Show that so many units of the part are done."""
        text = f"{self.text} {done} of {self.total}" if self.total else self.text
        if self.limit is None:
            self.line.update(done, text)
            return
        left = max(0.0, self.limit.end - self.limit.clock())
        self.line.update(60 * self.limit.minutes - left, text, seconds_left=left)
