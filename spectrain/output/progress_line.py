"""One line of progress that fits any terminal: how much is done and the time left come first, and
what does not fit is cut at the end. It is drawn anew in place, and nothing of it remains.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from .console import is_live

BAR_WIDTH = 12
# Drawings per second: more would take time from what is measured meanwhile.
REFRESH_RATE = 2


def format_duration(seconds: float) -> str:
    """Format a duration in words."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class ProgressLine:
    """Shows a part of a command on a terminal while it runs: title, bar, count, time left, text.

    `update` says what is done; the time left goes on by itself between two updates. Where nothing
    can be drawn anew (`is_live` is false), it shows nothing.
    """

    def __init__(
        self,
        title: str,
        total: float | None,
        console: Console,
        completed: float = 0,
        enabled: bool = True,
    ) -> None:
        self.title = title
        self.total = total
        self.completed = self.first = completed
        self.is_live = enabled and is_live(console)
        self.count = self.text = ""
        self.start_time = time.monotonic()
        # Seconds that were left at a time; None estimates them by what is done.
        self.seconds_left: float | None = None
        self.update_time = self.start_time
        self.live = Live(
            console=console,
            get_renderable=self.render,
            refresh_per_second=REFRESH_RATE,
            transient=True,
        )

    def __enter__(self) -> ProgressLine:
        if self.is_live:
            self.live.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.live.stop()

    def restart(self, total: float | None) -> None:
        """Begin to count anew, up to another total."""
        self.total = total
        self.completed = self.first = 0
        self.seconds_left = None
        self.start_time = self.update_time = time.monotonic()

    def update(
        self,
        completed: float,
        count: str,
        text: str | None = None,
        seconds_left: float | None = None,
    ) -> None:
        """Set what is done, how that is counted, the text behind it (None: the one before), and
        the seconds left where they are known.
        """
        self.completed = completed
        self.count = count
        self.text = self.text if text is None else text
        self.seconds_left = seconds_left
        self.update_time = time.monotonic()

    def estimate_left(self) -> float | None:
        """Return the seconds left; None where nothing says how many."""
        now = time.monotonic()
        if self.seconds_left is not None:
            return max(0.0, self.seconds_left - (now - self.update_time))
        done = self.completed - self.first
        if self.total is None or done <= 0:
            return None
        seconds = self.update_time - self.start_time
        return max(0.0, seconds / done * (self.total - self.completed) - (now - self.update_time))

    def render(self) -> Text:
        """Return the line, cut at its end where it does not fit."""
        parts = [self.title]
        if self.total:
            full = round(BAR_WIDTH * min(1.0, self.completed / self.total))
            parts.append("\u2501" * full + "\u2500" * (BAR_WIDTH - full))
        left = self.estimate_left()
        details = [self.count, "" if left is None else f"{format_duration(left)} left", self.text]
        return Text(
            "  ".join([" ".join(parts), *filter(None, details)]), no_wrap=True, overflow="ellipsis"
        )
