"""Process groups that end with the process that started them, even if it is killed.

As a program, this file is the guard of a group: it gets the group's number, waits for the end of
its standard input, and needs nothing but the standard library.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

# Seconds that a group may take to end by itself.
GRACE_SECONDS = 30.0
POLL_SECONDS = 0.05


@contextmanager
def run_group(
    arguments: Sequence[str], environment: Mapping[str, str], output: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command as the leader of a process group, and stop the group at the end of the block or
    the death of this process.

    `environment` holds all of its variables; `output` is the file that the command prints to.
    """
    process = subprocess.Popen(
        [*arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**environment},
        start_new_session=True,
    )
    guard = None
    try:
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        yield process
    finally:
        stop_group(process.pid, lambda: process.poll() is not None)
        process.wait()
        if guard is not None:
            with suppress(BrokenPipeError):
                guard.communicate(b"stopped\n")


def stop_group(group: int, has_ended: Callable[[], bool], seconds: float = GRACE_SECONDS) -> None:
    """Ask a process group to end, and kill what is left of it once its leader has ended or the
    seconds are over.
    """
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while not has_ended() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        os.killpg(group, signal.SIGKILL)


def is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def guard_group(group: int) -> None:
    """Wait until standard input ends, as it does when its writer dies, and stop the group unless
    a line released it.
    """
    if not sys.stdin.readline():
        stop_group(group, lambda: is_gone(group))


if __name__ == "__main__":
    # A terminal's interrupt is for the process that is guarded.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard_group(int(sys.argv[1]))
