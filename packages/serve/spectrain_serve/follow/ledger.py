"""The ledger: one JSON line per decision, with its numbers. A line is complete or absent."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spectrain.errors import UserError
from spectrain.files import iterate_lines, open_in_place, require_regular_file
from spectrain.output.text import mask_settings

from .clock import LATEST, read_date

MAX_WAITING = 1000
"""Entries that wait in memory while the disk is full; older ones are dropped."""


class Ledger:
    """Appends entries to a file; while the disk is full, they wait in memory."""

    def __init__(self, path: Path, clock: Callable[[], float] = read_date) -> None:
        self.path, self.clock = path, clock
        self._waiting: deque[str] = deque(maxlen=MAX_WAITING)

    def record(self, event: str, **numbers: Any) -> None:
        """Record a decision; a failure to write it raises nothing, and it is written with the
        next one.
        """
        entry = {"time": round(self.clock(), 3), "event": event, **mask_settings(numbers)}
        self._waiting.append(json.dumps(entry, default=str))
        self.flush()

    def flush(self) -> bool:
        """Write what waits; return whether all of it is on disk."""
        while self._waiting:
            try:
                append_line(self.path, self._waiting[0])
            except (OSError, UserError):
                return False
            self._waiting.popleft()
        return True


def append_line(path: Path, line: str) -> None:
    """Append a line to a file; after a failure, as of a full disk, the file is as it was before."""
    handle = open_in_place(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        size = os.fstat(handle).st_size
        # A power failure may have cut the last line.
        is_cut = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        content = ("\n" * is_cut + line + "\n").encode()
        try:
            written = 0
            while written < len(content):
                written += os.write(handle, content[written:])
            os.fsync(handle)
        except OSError:
            os.ftruncate(handle, size)
            raise
    finally:
        os.close(handle)


def read_ledger(
    path: Path, report: Callable[[str], None] = lambda problem: None
) -> Iterator[dict[str, Any]]:
    """Yield the entries of a ledger. A line that a power failure or an editor has damaged is left
    out, and `report` is called with the sentence that names it."""
    if not path.exists():
        return
    require_regular_file(path)
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(iterate_lines(file, path), 1):
            entry = parse_entry(line)
            if entry is not None:
                yield entry
            elif line.strip():
                report(
                    f"{path}: line {number} is left out, because it is no decision with its time"
                )


def parse_entry(line: str) -> dict[str, Any] | None:
    """Return the entry of a line, or None for a damaged line."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("event"), str):
        return None
    moment = entry.get("time")
    is_time = (
        isinstance(moment, (int, float)) and not isinstance(moment, bool) and 0 <= moment <= LATEST
    )
    return entry if is_time else None


def report_damage(problem: str) -> None:
    """Print that a line of a file is left out."""
    print(problem, file=sys.stderr, flush=True)


def describe_entry(entry: dict[str, Any]) -> str:
    """Return the numbers of a decision in one line."""
    if (
        entry["event"] in ("promoted", "kept for inspection", "proven, not swapped")
        and {"candidate", "reason"} <= entry.keys()
    ):
        return f"candidate {entry['candidate']}: {entry['reason']}"
    shown = {key: value for key, value in entry.items() if key not in ("time", "event")}
    return ", ".join(
        f"{key} {format_number(value) if isinstance(value, float) else value}"
        for key, value in shown.items()
    )[:300]


def format_number(value: float | None) -> str:
    """Return a number with three digits, or nothing."""
    return "" if value is None else f"{value:.3f}"


def format_time(seconds: float) -> str:
    """Return a time of this machine's clock."""
    return time.strftime("%d %b %H:%M:%S", time.localtime(seconds))
