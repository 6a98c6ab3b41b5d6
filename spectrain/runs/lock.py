"""Locks in a run folder, so that two processes of one kind never write into it at the same time."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from spectrain.errors import UserError

# Seconds to wait for a launch that is about to end: one whose network is cut ends itself within 30 s.
LOCK_SECONDS = 45.0


@contextmanager
def lock_run(run: Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold the lock of training in a run folder; raise a UserError if another process has it for longer than `seconds`."""
    taken, remedy = "another launch trains in this folder", "let it finish or end it, then use the same command again"
    with lock_file(run / ".lock", f"run={run}: {taken}", remedy, seconds):
        yield


@contextmanager
def lock_file(path: Path, taken: str, remedy: str, seconds: float = 0.0) -> Iterator[None]:
    """Hold the lock of a file; if another process has it for longer than `seconds`, raise a UserError that says `taken`, names
    that process, and says the `remedy`.

    The system releases it when the process ends, however it ends. On a file system without locks nothing is checked.
    """
    with path.open("a+") as file:
        deadline = time.monotonic() + seconds
        while not _try_lock(file):
            if time.monotonic() >= deadline:
                file.seek(0)
                raise UserError(f"{taken} ({file.read().strip()}); {remedy}")
            time.sleep(min(1.0, seconds))
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # This file system has no locks.
        return True
    return True
