"""Output as records of the logger `spectrain`, in place of printed lines."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from .text import clean_text

LOGGER = logging.getLogger("spectrain")
_is_logging = False


def use_logging(enabled: bool = True) -> None:
    """Send what the Python interface would print to the logger `spectrain`, line by line, or print
    it again with False.

    Lines of stdout have the level INFO, those of stderr WARNING. Secrets are masked.
    """
    global _is_logging
    _is_logging = enabled


class LogStream(io.TextIOBase):
    """A stream whose finished lines become records of the logger `spectrain`."""

    def __init__(self, level: int, stream: TextIO) -> None:
        self.level = level
        # Where a handler writes that takes sys.stderr for its stream.
        self.stream = stream
        self.text = ""
        self.is_emitting = False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Log the lines that this text ends; of a line that was drawn anew, as of a progress bar,
        only the last state.
        """
        if self.is_emitting:
            return self.stream.write(text)
        *lines, self.text = (self.text + text).split("\n")
        self.is_emitting = True
        try:
            for line in lines:
                state = line.rstrip("\r").rpartition("\r")[2].rstrip()
                if state:
                    LOGGER.log(self.level, "%s", clean_text(state))
        finally:
            self.is_emitting = False
        return len(text)

    def close_line(self) -> None:
        """Log a last line that has no end."""
        if self.text:
            self.write("\n")


@contextmanager
def redirect_output() -> Iterator[None]:
    """Log what is printed until the end of the block, if `use_logging` asked for it."""
    if not _is_logging or isinstance(sys.stdout, LogStream):
        yield
        return
    streams = sys.stdout, sys.stderr
    # A handler may print to either stream; it must reach the real one.
    logged = LogStream(logging.INFO, streams[0]), LogStream(logging.WARNING, streams[1])
    sys.stdout, sys.stderr = logged
    try:
        yield
    finally:
        for stream in logged:
            stream.close_line()
        sys.stdout, sys.stderr = streams
