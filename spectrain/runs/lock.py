"""A lock on a run folder, so that two launches of one run never write into it at the same time."""

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
    """Hold the lock of a run folder; raise a UserError if another process has it for longer than `seconds`.

    The system releases it when the process ends, however it ends. On a file system without locks nothing is checked.
    """
    with (run / ".lock").open("a+") as file:
        deadline = time.monotonic() + seconds
        while not _try_lock(file):
            if time.monotonic() >= deadline:
                file.seek(0)
                raise UserError(
                    f"run={run}: another launch trains in this folder ({file.read().strip()}); let it finish or end it, then "
                    "use the same command again"
                )
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
