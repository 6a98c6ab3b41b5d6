"""The clock by which recorded conversations age: it never jumps, whatever happens to the clock of the machine."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from spectrain.config.checked_json import read_json_as
from spectrain.files import write_text

LATEST = 253402300799.0
"""The last second of the year 9999, the largest date that is printed."""


@dataclass(frozen=True)
class SavedTime:
    """A moment by both clocks, as clock.json holds it."""

    # By this clock.
    time: float
    # By the clock of the machine, in seconds since 1970.
    date: float


class FollowClock:
    """Seconds that go on at the pace of a monotonic clock. They begin as seconds since 1970, so that they read as dates.

    The time between two processes is known by the clock of the machine alone, which may be wrong. So it counts for at most
    `largest_gap` seconds, and never backwards.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start, self.began = read_date(), time.monotonic()

    def now(self) -> float:
        """Return the time by this clock."""
        return self.start + time.monotonic() - self.began

    def load(self, largest_gap: float, newest: float | None) -> None:
        """Go on where an earlier process stopped or, where it saved no time, after the `newest` conversation of it."""
        date = read_date()
        saved = None if newest is None else SavedTime(newest, newest)
        if self.path.exists():
            saved = read_json_as(self.path, SavedTime, "delete it; then ages count from the newest conversation")
        if saved is not None:
            self.start = saved.time + min(max(0.0, date - saved.date), largest_gap)
            self.began = time.monotonic()

    def save(self) -> None:
        """Save the time, from which the next process goes on."""
        write_text(self.path, json.dumps({"time": self.now(), "date": read_date()}) + "\n")


def read_date() -> float:
    """Return the date by the clock of the machine, in seconds since 1970. It may jump, so that no age is measured by it."""
    return time.time()
