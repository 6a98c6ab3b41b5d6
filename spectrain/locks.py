"""Locks of files and folders, so that two processes of one kind never write to one place at the same time.

The system releases a lock when its process ends, however it ends. Some file systems have no locks; there nothing is guarded.
"""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spectrain.errors import UserError


class LockTaken(UserError):
    """Another process holds a lock."""


@contextmanager
def lock_file(path: Path, taken: str, remedy: str, seconds: float = 0.0, is_temporary: bool = False) -> Iterator[bool]:
    """Hold the lock of a file; if another process has it for longer than `seconds`, raise `LockTaken`, which says `taken`,
    names that process, and says the `remedy`.

    Yield whether the file system has locks. A temporary file is deleted at the end.
    """
    deadline = time.monotonic() + seconds
    file = path.open("a+b")
    try:
        while (is_guarded := try_lock(file.fileno())) is None or not is_open_file(file.fileno(), path):
            if is_guarded is None and time.monotonic() >= deadline:
                holder = os.pread(file.fileno(), 300, 0).decode(errors="replace").strip() or "another process"
                raise LockTaken(f"{taken} ({holder}); {remedy}")
            if is_guarded is None:
                time.sleep(min(1.0, seconds))
            # The process that held the lock may have deleted the file.
            file.close()
            file = path.open("a+b")
        os.truncate(file.fileno(), 0)
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
        try:
            yield is_guarded
        finally:
            if is_temporary:
                path.unlink(missing_ok=True)
    finally:
        file.close()


def try_lock(handle: int) -> bool | None:
    """Lock an open file or folder until it is closed. Return None if another process has the lock, and False if the file
    system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:
        return False
    return True


def is_open_file(handle: int, path: Path) -> bool:
    """Tell whether a path still leads to an open file or folder, which another process may have deleted or renamed."""
    try:
        current = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(current, os.fstat(handle))
