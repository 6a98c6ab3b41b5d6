"""What tests of started engines share: the interpreter of the fake engine, and free ports."""

import sys
import time
from collections.abc import Callable
from pathlib import Path


def fake_python(folder: Path) -> str:
    """Return a program that behaves as the interpreter of an engine's environment."""
    program = folder / "python"
    program.write_text(
        f'#!/bin/sh\nexec {sys.executable} -S {Path(__file__).with_name("fake_engine.py")} "$@"\n'
    )
    program.chmod(0o755)
    return str(program)


def is_running(process: int) -> bool:
    """Tell whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def becomes_true(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()
