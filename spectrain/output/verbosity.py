"""How much a command prints: SPECTRAIN_LOG and the flags --quiet, --notes and --json.

The command line imports this before anything heavy.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any, Literal, TextIO, get_args

Level = Literal["quiet", "normal", "notes"]
"""quiet prints results, warnings and errors; normal prints progress too; notes adds the sentences
that explain a score.
"""
VARIABLE = "SPECTRAIN_LOG"
FLAGS = ("--quiet", "--notes", "--json")


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
def command_output(level: Level, as_json: bool = False, has_results: bool = True) -> Iterator[None]:
    """Print as much as `level` says until the end of the block.

    A quiet command prints what it does inside of `result_output` alone, and its errors; one
    without such results (`has_results` is false) prints all but progress. With `as_json` nothing
    but `print_json` reaches the standard output.
    """
    global _output
    before = _output
    is_muted = as_json or (level == "quiet" and has_results)
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
    """Print a result as JSON, if that was asked for."""
    if _output.as_json:
        print(json.dumps(value, indent=2), file=_output.results, flush=True)
