"""The streams of a command: what `print` and libraries write shows control characters and holds no
secrets.

The command line imports this before anything heavy, so rich stays out of it.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from .text import clean_text

CURSOR_MOVES = re.compile("(\r|\x1b\\[A)")


COLOUR_RESET = "\x1b[0m"
"""The sequence with which colorama, which numba starts, ends a process on a terminal."""


class CleanStream:
    """A stream that shows control characters and masks secrets. Consoles of rich, which clean
    their texts, write past it.
    """

    def __init__(self, stream: TextIO, keeps_bars: bool = False) -> None:
        # The name by which rich finds the stream behind one that stands in for it.
        self.rich_proxied_file = stream
        # Whether progress bars of libraries may move the cursor.
        self.keeps_bars = keeps_bars and stream.isatty()

    def write(self, text: str) -> int:
        """Write a text; of a progress bar on a terminal, the moves of the cursor stay."""
        if text == COLOUR_RESET and self.rich_proxied_file.isatty():
            self.rich_proxied_file.write(text)
            return len(text)
        parts = CURSOR_MOVES.split(text) if self.keeps_bars else [text]
        # Every second part is a move.
        self.rich_proxied_file.write(
            "".join(part if at % 2 else clean_text(part) for at, part in enumerate(parts))
        )
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def open_closed_streams() -> None:
    """Open the null device in place of standard streams that were closed before this process began,
    as by `>&-`: a file that is opened later would take a stream's number, and receive what is
    printed.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one.
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            # The stream stays open as long as the process.
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, stream)


def drop_output() -> None:
    """Print nothing more on a standard output that nobody reads."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def clean_output() -> Iterator[None]:
    """Clean what is printed by `print` and by libraries, until the end of the block."""
    streams = sys.stdout, sys.stderr
    for stream in streams:
        # Names of files may be no text, and a terminal may lack characters.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout = CleanStream(streams[0])
    sys.stderr = CleanStream(streams[1], keeps_bars=True)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def wrap_words(text: str, stream: TextIO) -> str:
    """Break the lines of a text between words where a terminal would break them inside of one; a
    word that is longer than a line, as a command's path may be, stays whole.
    """
    if not stream.isatty():
        return text
    columns = shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)
        if len(line) > columns
        else line
        for line in text.split("\n")
    )


def print_text(text: str) -> None:
    """Print what is to be read, in lines that fit a terminal."""
    print(wrap_words(text, sys.stdout), flush=True)


def print_warning(sentence: str) -> None:
    """Print a sentence on the error stream, with the name of the program before it."""
    print(wrap_words(f"spectrain: {sentence}", sys.stderr), file=sys.stderr, flush=True)
