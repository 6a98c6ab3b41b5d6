"""When a training validates by default: at its start, at its end, and between them as often as
its time allows.
"""

import math
from dataclasses import dataclass

MAX_SHARE = 0.05
"""Share of a training's time that its validations take at most, unless those of start and end
alone take more.
"""
MAX_VALIDATIONS = 22
"""Validations of a training at most, those of start and end included: more points make no better
curve.
"""


def count_affordable(total: float, spent: float, each: float) -> int:
    """Return how many validations fit between now and the end of a run, where the one at the end is
    reserved.

    All arguments are seconds: of the whole run, of its validations so far, and of one validation.
    """
    if each <= 0:
        return MAX_VALIDATIONS
    return max(0, math.floor((MAX_SHARE * total - spent - each) / each))


@dataclass
class ValidationSchedule:
    """The step of the next validation, which is planned anew from measured times."""

    next_step: float = math.inf

    def update(self, last: int, num_steps: float, num_done: int, num_affordable: int) -> None:
        """Distribute the validations that are left evenly over the steps after the `last`
        validated one.
        """
        count = min(num_affordable, MAX_VALIDATIONS - 1 - num_done)
        self.next_step = (
            last + math.ceil((num_steps - last) / (count + 1)) if count > 0 else math.inf
        )
