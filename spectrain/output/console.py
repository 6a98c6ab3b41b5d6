"""Consoles that read no text of files, models and servers as markup, and show its control
characters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.util import find_spec
from typing import IO, Any

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from .logs import LogStream
from .text import clean_text, escape_controls
from .verbosity import is_quiet


class PlainConsole(Console):
    """A console whose texts come from files, models and servers: no markup, no emoji codes, no
    control characters of theirs.
    """

    @property
    def file(self) -> IO[str]:
        """Return the stream to write to: the one behind all that stand in for it, because the
        sequences of a live display must reach the terminal as they are.
        """
        file = super().file
        while (proxied := getattr(file, "rich_proxied_file", None)) is not None:
            file = proxied
        return file

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(clean_text(text), **options)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            segment if segment.control else Segment(escape_controls(segment.text), segment.style)
            for segment in buffer
        )


def make_console(**options: Any) -> Console:
    """Return a console that prints texts as they are; where output is logged, as plain lines."""
    plain: dict[str, Any] = {"markup": False, "emoji": False}
    if isinstance(sys.stdout, LogStream):
        plain |= {"force_terminal": False, "force_jupyter": False}
    return PlainConsole(**{**plain, **options})


def is_live(console: Console) -> bool:
    """Tell whether a console can draw a progress bar anew: on a terminal, or in a notebook that has
    the widgets for it, and unless the command is quiet.
    """
    if is_quiet():
        return False
    return console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)
