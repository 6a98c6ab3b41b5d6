"""A mean that follows slow changes."""

from dataclasses import dataclass


@dataclass
class RunningMean:
    """The mean of all values at first, and of about the last `memory` values later."""

    value: float = 0.0
    # Values in the mean, at most the memory of the last update; at first those that the initial
    # value counts for.
    count: int = 0

    def add(self, value: float, memory: int) -> None:
        self.count = min(self.count + 1, memory)
        self.value += (value - self.value) / self.count
