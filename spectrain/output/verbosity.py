"""How much a command prints: SPECTRAIN_LOG and the flags --quiet, --notes and --json.

The command line imports this before anything heavy.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any, Literal, TextIO, get_args

Level = Literal["quiet", "normal", "notes"]
"""quiet prints results, warnings and errors; normal prints progress too; notes adds the sentences
that explain a score.
"""
VARIABLE = "SPECTRAIN_LOG"
OUTPUT_FLAGS = ("--quiet", "--json")
"""The flags about output that nearly every command takes."""


@dataclass
class Output:
    """What the running command prints."""

    level: Level = "normal"
    # Whether the result is printed as JSON, and everything else on the error stream.
    as_json: bool = False
    # The stream of results, where another one stands in for it.
    results: TextIO | None = None
    # That other one.
    hidden: TextIO | None = None


_output = Output()


def read_level(flags: tuple[str, ...] = ()) -> Level:
    """Return the level that flags or else the environment ask for; raise a ValueError for an
    unknown one.
    """
    if "--quiet" in flags:
        return "quiet"
    if "--notes" in flags:
        return "notes"
    value = os.environ.get(VARIABLE) or "normal"
    for level in get_args(Level):
        if value == level:
            return level
    raise ValueError(f"{VARIABLE}={value}: choose from {', '.join(get_args(Level))}")


@contextmanager
def command_output(level: Level, as_json: bool = False, is_result: bool = False) -> Iterator[None]:
    """Print as much as `level` says until the end of the block.

    A quiet command prints what it does inside of `result_output` alone, and its errors; one that
    prints nothing but its result (`is_result`) prints all of it. With `as_json` nothing but
    `print_json` reaches the standard output.
    """
    global _output
    before = _output
    is_muted = as_json or (level == "quiet" and not is_result)
    stream = sys.stderr if as_json and level != "quiet" else io.StringIO()
    _output = Output(level, as_json, sys.stdout if is_muted else None, stream)
    try:
        if _output.results is None:
            yield
        else:
            with redirect_stdout(stream):
                yield
    finally:
        _output = before


@contextmanager
def result_output() -> Iterator[None]:
    """Print what is inside of the block even where a command is quiet; it is a result. What goes
    to a log, as the scores of a comparison, still goes there.
    """
    is_logged = sys.stdout is not _output.hidden
    if _output.results is None or _output.as_json or is_logged:
        yield
        return
    with redirect_stdout(_output.results):
        yield


def is_quiet() -> bool:
    """Tell whether progress is left out."""
    return _output.level == "quiet"


def shows_notes() -> bool:
    """Tell whether the sentences that explain a score are printed."""
    return _output.level == "notes"


def print_json(value: Any) -> None:
    """Print a result as JSON, if that was asked for. JSON has no infinite numbers; null stands for
    them.
    """
    if _output.as_json:
        text = json.dumps(to_json(value), indent=2, allow_nan=False)
        print(text, file=_output.results, flush=True)


def to_json(value: Any) -> Any:
    """Return a value with what JSON cannot hold replaced: other objects by their text, and numbers
    that are not finite by None.
    """
    if isinstance(value, Mapping):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(entry) for entry in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if isinstance(value, (str, int, type(None))) else str(value)
