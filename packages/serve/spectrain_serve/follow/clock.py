"""The clock by which recorded conversations age: it never jumps, whatever happens to the clock
of the machine.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le

from spectrain.files import write_text

from .checked_json import read_json_as

LATEST = 253402300799.0
"""The last second of the year 9999, the largest date that is printed."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class SavedTime:
    """A moment by both clocks, as clock.json holds it."""

    # By this clock.
    time: Annotated[float, Ge(0), Le(LATEST)]
    # By the clock of the machine, in seconds since 1970.
    date: Annotated[float, Ge(0), Le(LATEST)]
    # Seconds since the machine was started, and which start that was; None where the system does
    # not tell.
    uptime: Annotated[float, Ge(0), Le(LATEST)] | None = None
    boot: str | None = None


class FollowClock:
    """Seconds that go on at the pace of a monotonic clock. They begin as seconds since 1970, so
    that they read as dates.

    The time between two processes is that since the machine was started, which does not jump
    either. After another start of the machine it is known by the clock of the machine alone, which
    may be wrong. So it then counts for at most `largest_gap` seconds, and never backwards.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = read_date()
        self.began = time.monotonic()

    def now(self) -> float:
        """Return the time by this clock."""
        return self.start + time.monotonic() - self.began

    def load(self, largest_gap: float, newest: float | None) -> None:
        """Go on where an earlier process stopped or, where it saved no time, after the `newest`
        conversation of it.
        """
        saved = None if newest is None else SavedTime(newest, newest)
        if self.path.exists():
            saved = read_json_as(
                self.path, SavedTime, "delete it; then ages count from the newest conversation"
            )
        if saved is not None:
            self.start = saved.time + find_gap(saved, largest_gap)
            self.began = time.monotonic()

    def save(self) -> None:
        """Save the time, from which the next process goes on."""
        saved = SavedTime(self.now(), read_date(), read_uptime(), read_boot())
        write_text(self.path, json.dumps(asdict(saved)) + "\n")


def find_gap(saved: SavedTime, largest_gap: float) -> float:
    """Return the seconds since a time was saved."""
    uptime = read_uptime()
    if (
        uptime is not None
        and saved.uptime is not None
        and saved.boot is not None
        and saved.boot == read_boot()
    ):
        return max(0.0, uptime - saved.uptime)
    return min(max(0.0, read_date() - saved.date), largest_gap)


def read_uptime() -> float | None:
    """Return the seconds since the machine was started, its sleep included; None where the
    system does not tell.
    """
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return None if clock is None else time.clock_gettime(clock)


def read_boot() -> str | None:
    """Return which start of the machine this is; None where the system does not tell."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None


def read_date() -> float:
    """Return the date by the clock of the machine, in seconds since 1970. It may jump, so that
    no age is measured by it.
    """
    return time.time()
