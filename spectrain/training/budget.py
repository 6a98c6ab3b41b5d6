"""The budget of a training run, in steps or in minutes."""

import math
import time
from dataclasses import dataclass

from .parallel import ParallelStrategy

ASSUMED_STEPS = 1000.0  # steps of a training by the clock, before any of them is timed


@dataclass
class TimeSpent:
    """Seconds of a training run over all resumed parts, validations and checkpoints included."""

    seconds: float = 0.0
    first: float = 0.0  # until its first step was done, in which things are compiled: no measure of the others


class Budget:
    """A limit of steps, of minutes, or of both; the first to be reached ends the run."""

    def __init__(self, steps: int | None, minutes: float | None) -> None:
        self.max_steps: float = math.inf if steps is None else steps
        self.max_seconds = None if minutes is None else 60 * minutes
        self.resume_from(TimeSpent())

    def resume_from(self, time_spent: TimeSpent) -> None:
        """Continue from the time spent that a checkpoint holds."""
        self.time_spent, self.start_time = time_spent, time.monotonic() - time_spent.seconds

    def record_time(self, parallel: ParallelStrategy) -> None:
        """Record the time after a step, by the main process's clock."""
        if self.max_seconds is None:
            return
        seconds = parallel.all_gather(time.monotonic() - self.start_time)[0]
        self.time_spent = TimeSpent(seconds, self.time_spent.first or seconds)

    def num_steps(self, step: int) -> float:
        """Return the steps of the run, `step` of them done. With a time limit, estimate them from the time per step."""
        used, first = self.time_spent.seconds, self.time_spent.first
        if self.max_seconds is None:
            return self.max_steps
        if used <= first:
            return min(self.max_steps, ASSUMED_STEPS)
        return min(self.max_steps, max(step, 1 + (step - 1) * (self.max_seconds - first) / (used - first)))

    def is_done(self, step: int) -> bool:
        """Tell whether the budget is used up, or less than half a step of it is left."""
        by_clock = self.max_seconds is not None and step > 0 and self.time_spent.seconds * (1 + 0.5 / step) >= self.max_seconds
        return step >= self.max_steps or by_clock
