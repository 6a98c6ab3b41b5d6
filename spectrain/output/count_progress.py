"""The progress through a number of bytes or tokens: a bar on a terminal, and elsewhere a line now
and then.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Literal

from .console import make_console
from .progress_line import ProgressLine, format_duration
from .verbosity import is_quiet

# Seconds between two lines where there is no terminal.
LINE_SECONDS = 10.0


class CountProgress:
    """Shows on the error stream how many bytes or tokens of a total are done."""

    def __init__(
        self,
        title: str,
        total: int,
        completed: int = 0,
        unit: Literal["bytes", "tokens"] = "bytes",
        enabled: bool = True,
    ) -> None:
        self.title, self.total, self.completed = title, total, completed
        self.unit, self.enabled = unit, enabled and not is_quiet()
        self.line = ProgressLine(
            title, total, make_console(stderr=True), completed, enabled=enabled
        )
        self.line.update(completed, self.describe())
        self.last_line = time.monotonic()

    def __enter__(self) -> CountProgress:
        self.line.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.line.__exit__(*raised)

    def advance(self, count: int, seconds_at_most: float | None = None) -> None:
        """Count more as done; a time limit ends the rest in `seconds_at_most` seconds."""
        self.completed += count
        self.line.update(self.completed, self.describe())
        left = self.line.estimate_left()
        if seconds_at_most is not None and (left is None or left > seconds_at_most):
            left = seconds_at_most
            self.line.update(self.completed, self.describe(), seconds_left=left)
        is_due = time.monotonic() - self.last_line > LINE_SECONDS
        if self.enabled and not self.line.is_live and is_due:
            self.last_line = time.monotonic()
            time_left = "" if left is None else f"; {format_duration(left)} left"
            print(f"{self.title}: {self.describe()}{time_left}", file=sys.stderr, flush=True)

    def describe(self) -> str:
        """Return how much is done in words."""
        if self.unit == "bytes":
            return f"{self.completed / 1e9:.2f} of {self.total / 1e9:.2f} GB"
        return f"{self.completed} of {self.total} {self.unit}"
