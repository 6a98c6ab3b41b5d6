"""The ledger: one JSON line per decision, with its numbers. A line is complete or absent."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MAX_WAITING = 1000
"""Entries that wait in memory while the disk is full; older ones are dropped."""


class Ledger:
    """Appends entries to a file; while the disk is full, they wait in memory."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path, self.clock = path, clock
        self._waiting: deque[str] = deque(maxlen=MAX_WAITING)

    def record(self, event: str, **numbers: Any) -> None:
        """Record a decision; a failure to write it raises nothing, and it is written with the next one."""
        self._waiting.append(json.dumps({"time": round(self.clock(), 3), "event": event, **numbers}, default=str))
        self.flush()

    def flush(self) -> bool:
        """Write what waits; return whether all of it is on disk."""
        while self._waiting:
            try:
                append_line(self.path, self._waiting[0])
            except OSError:
                return False
            self._waiting.popleft()
        return True


def append_line(path: Path, line: str) -> None:
    """Append a line to a file; after a failure, as of a full disk, the file is as it was before."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
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


def read_ledger(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a ledger; a line that a power failure has cut is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and "event" in entry:
                yield entry
