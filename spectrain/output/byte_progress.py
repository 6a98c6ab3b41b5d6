"""The progress of reading or writing a number of bytes: a bar on a terminal, and elsewhere a line
now and then.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from .console import make_console

# Seconds between two lines where there is no terminal.
LINE_SECONDS = 10.0


class ByteProgress:
    """Shows on the error stream how much of something is done."""

    def __init__(self, title: str, total: int, completed: int = 0) -> None:
        self.title, self.total, self.completed = title, total, completed
        console = make_console(stderr=True)
        self.is_live = console.is_terminal
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not self.is_live,
        )
        self.task = self.bar.add_task(title, total=total, completed=completed)
        self.last_line = time.monotonic()

    def __enter__(self) -> ByteProgress:
        self.bar.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.bar.__exit__(*raised)

    def advance(self, num_bytes: int) -> None:
        """Count more bytes as done."""
        self.completed += num_bytes
        if self.is_live:
            self.bar.update(self.task, completed=self.completed)
        elif time.monotonic() - self.last_line > LINE_SECONDS:
            self.last_line = time.monotonic()
            line = f"{self.title}: {self.completed / 1e9:.2f} of {self.total / 1e9:.2f} GB"
            print(line, file=sys.stderr, flush=True)
