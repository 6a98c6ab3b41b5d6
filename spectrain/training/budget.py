"""The budget of a training run: a number of steps, a number of minutes, or both."""

import math
import time
from dataclasses import dataclass

from .parallel.base import ParallelStrategy

# Steps of a training with trainer.max_minutes, before any of them is timed.
ASSUMED_STEPS = 1000.0


@dataclass
class TimeSpent:
    """Seconds of a training run over all resumed parts, validations and checkpoints included."""

    seconds: float = 0.0
    # Seconds until the first step was done. It compiles kernels, so it does not measure the others.
    first: float = 0.0


class Budget:
    """A limit of steps, of minutes, or of both; the first to be reached ends the run."""

    def __init__(self, steps: int | None, minutes: float | None) -> None:
        self.max_steps: float = math.inf if steps is None else steps
        self.max_seconds = None if minutes is None else 60 * minutes
        # Seconds that follow the last step: those of its validation.
        self.reserved = 0.0
        self.resume_from(TimeSpent())

    def resume_from(self, time_spent: TimeSpent) -> None:
        """Continue from the time spent that a checkpoint holds."""
        self.time_spent = time_spent
        self.start_time = time.monotonic() - time_spent.seconds

    def record_time(self, parallel: ParallelStrategy) -> None:
        """Record the time after a step, by the main process's clock."""
        used = time.monotonic() - self.start_time
        seconds = used if self.max_seconds is None else self._measure_seconds(parallel)
        self.time_spent = TimeSpent(seconds, self.time_spent.first or seconds)

    def seconds_until(self, share: float, parallel: ParallelStrategy) -> float:
        """Return the seconds until this share of the time is over, by the main process's clock;
        infinity without a time limit. Every process must call this.
        """
        if self.max_seconds is None:
            return math.inf
        return share * self.max_seconds - self._measure_seconds(parallel)

    def _measure_seconds(self, parallel: ParallelStrategy) -> float:
        return float(parallel.all_gather(time.monotonic() - self.start_time)[0])

    def num_steps(self, step: int) -> float:
        """Return the steps of the run, `step` of them done. With a time limit, estimate them
        from the time per step.
        """
        used = self.time_spent.seconds
        first = self.time_spent.first
        if self.max_seconds is None:
            return self.max_steps
        if used <= first:
            return min(self.max_steps, ASSUMED_STEPS)
        return min(
            self.max_steps, max(step, 1 + (step - 1) * (self.step_seconds - first) / (used - first))
        )

    @property
    def step_seconds(self) -> float:
        """The second after which the last step ends; infinity without a time limit."""
        return math.inf if self.max_seconds is None else self.max_seconds - self.reserved

    @property
    def is_paced(self) -> bool:
        """Tell whether a step after the first one was timed, or no time limit makes the number
        of steps an estimate.
        """
        return self.max_seconds is None or self.time_spent.seconds > self.time_spent.first

    @property
    def seconds_left(self) -> float | None:
        """The seconds of the time limit that were left after the newest step; None without a
        limit.
        """
        if self.max_seconds is None:
            return None
        return max(0.0, self.step_seconds - self.time_spent.seconds)

    def total_seconds(self, step: int) -> float | None:
        """Return the estimated seconds of the whole run after `step` steps; None before a second
        step is timed.
        """
        used = self.time_spent.seconds
        first = self.time_spent.first
        if step < 2 or used <= first:
            return None
        return used + max(0.0, self.num_steps(step) - step) * (used - first) / (step - 1)

    def is_done(self, step: int) -> bool:
        """Tell whether the budget is used up, or less than half a step of it is left."""
        if step >= self.max_steps or self.max_seconds is None or not step:
            return step >= self.max_steps
        # The first step may have come after a fit of the initial weights.
        seconds, first = self.time_spent.seconds, self.time_spent.first
        each = (seconds - first) / (step - 1) if step > 1 else 0.0
        return seconds + 0.5 * each >= self.step_seconds
