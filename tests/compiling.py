"""What test processes compile, compiled by one of them at a time.

A fresh checkout has neither Numba's machine code nor test modules with pytest's assertions. Two
processes that start together need the same, a second or more for a kernel; the process that waits
finds the other's result on disk.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any, TextIO
from zlib import crc32

from filelock import FileLock, Timeout

FOLDER = Path(__file__).with_name("__pycache__")
# seconds after which a process compiles at once: no kernel takes as long, so the other process
# will never end
LONGEST_WAIT = 300.0


def has_other_workers() -> bool:
    """Tell whether other processes run tests of the same session."""
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1


def compile_in_turn() -> None:
    """Let Numba's dispatchers and callbacks compile while no other test process does."""
    from numba.core.ccallback import CFunc
    from numba.core.dispatcher import Dispatcher

    FOLDER.mkdir(exist_ok=True)
    lock = FileLock(FOLDER / "numba.lock", timeout=LONGEST_WAIT)
    for compiler in (CFunc, Dispatcher):
        compiler.compile = take_turns(compiler.compile, lock)


def take_turns(compile: Callable[..., Any], lock: FileLock) -> Callable[..., Any]:
    """Return `compile` under a lock, which a compilation inside another one holds already."""

    @wraps(compile)
    def compile_alone(*args: Any, **kwargs: Any) -> Any:
        try:
            lock.acquire()
        except Timeout:
            return compile(*args, **kwargs)
        try:
            return compile(*args, **kwargs)
        finally:
            lock.release()

    return compile_alone


@cache
def open_module_locks() -> TextIO:
    """Open the file whose bytes stand for test modules."""
    FOLDER.mkdir(exist_ok=True)
    return (FOLDER / "modules.lock").open("w")


@contextmanager
def import_in_turn(module: Path) -> Iterator[None]:
    """Let no other test process import this test module meanwhile."""
    file = open_module_locks()
    offset = crc32(str(module).encode())
    fcntl.lockf(file, fcntl.LOCK_EX, 1, offset)
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, offset)
