"""A limit of the time that a score takes: how many prompts fit into it, with what follows their
decoding.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

# Prompts that are decoded even if the time runs out before.
MIN_PROMPTS = 4
# What follows decoding, in runs of one prompt by one system: the reference of each prompt, and
# memory, drafts and page.
CHECK_RUNS = 1.5
REPORT_RUNS = 9.0


@dataclass
class TimeLimit:
    """The time of a score, which begins when this is constructed."""

    minutes: float
    # Whether outputs are checked and a report is written after decoding.
    checks: bool = True
    reports: bool = True
    # How often every pair is decoded where times are unsteady.
    repeats: int = 2
    clock: Callable[[], float] = time.perf_counter
    end: float = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.clock() + 60 * self.minutes

    def seconds_left(self, num_prompts: int, run_seconds: float) -> float:
        """Return the seconds left for decoding, if so many prompts are checked then; a run of
        one takes `run_seconds`.
        """
        return (
            self.end
            - self.clock()
            - run_seconds * (CHECK_RUNS * num_prompts * self.checks + REPORT_RUNS * self.reports)
        )
