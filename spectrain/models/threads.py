"""The number of threads that a kind of step computes with on a CPU. An installed package chooses
it, unless a person has set it.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

DECODING_TRIAL = 4
"""Rounds of decoding that each number of threads is timed by."""
# by which a person sets the number of threads
PERSONAL_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class ThreadTuner(Protocol):
    """Chooses the number of threads of one kind of step: call `set_threads` before a step and
    `record_step` after it.
    """

    chosen: int

    @property
    def is_chosen(self) -> bool:
        """Whether the number was chosen by times."""

    def set_threads(self) -> None:
        """Set the number of threads for the next step."""

    def record_step(self, seconds: float, work: float = 1.0) -> None:
        """Record the seconds of the step since `set_threads`, and its amount of work where that
        differs between steps.
        """

    def summary(self) -> dict[str, Any]:
        """Return the choice with its measurements, for summary.json."""

    def describe(self) -> str:
        """Describe the choice with its measurements in a few words."""


def personal_variable() -> str | None:
    """Return the environment variable by which a person set the number of threads."""
    return next((name for name in PERSONAL_VARIABLES if os.environ.get(name)), None)


def format_threads(count: int | None) -> str:
    """Format a number of threads; None is an engine that chooses it itself."""
    return "its own threads" if count is None else f"{count} thread{'s' * (count > 1)}"
