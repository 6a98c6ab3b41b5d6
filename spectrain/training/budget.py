"""How long a training lasts: so many steps, or so many minutes, whatever a step takes on the machine."""

import math
import time
from dataclasses import dataclass

from .parallel import Parallel

GUESS = 1000.0  # steps of a training by the clock, before any of them is timed


@dataclass
class Spent:
    """Seconds of a training, over all its parts where it was resumed: looks at held-out data and checkpoints are in them."""

    seconds: float = 0.0
    first: float = 0.0  # until its first step was done, in which things are compiled: no measure of the others


class Budget:
    """Steps, minutes, or whichever of both is used up first."""

    def __init__(self, steps: int | None, minutes: float | None) -> None:
        self.steps: float = math.inf if steps is None else steps
        self.seconds = None if minutes is None else 60 * minutes
        self.start(Spent())

    def start(self, spent: Spent) -> None:
        """Go on with what a checkpoint says was spent."""
        self.spent, self.began = spent, time.monotonic() - spent.seconds

    def tick(self, shared: Parallel) -> None:
        """A step is done; the main process's clock is that of all."""
        if self.seconds is None:
            return
        seconds = shared.gathered(time.monotonic() - self.began)[0]
        self.spent = Spent(seconds, self.spent.first or seconds)

    def num_steps(self, step: int) -> float:
        """Steps of the whole training, `step` of them done; by the clock, the share of them is the share of the time."""
        used, first = self.spent.seconds, self.spent.first
        if self.seconds is None:
            return self.steps
        if used <= first:
            return min(self.steps, GUESS)
        return min(self.steps, max(step, 1 + (step - 1) * (self.seconds - first) / (used - first)))

    def is_done(self, step: int) -> bool:
        """Whether it is used up, or less is left than half a step."""
        by_clock = self.seconds is not None and step > 0 and self.spent.seconds * (1 + 0.5 / step) >= self.seconds
        return step >= self.steps or by_clock
