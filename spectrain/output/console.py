"""Consoles that read no text of files, models and servers as markup, and show its control
characters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from .text import clean_text, escape_controls


class PlainConsole(Console):
    """A console whose texts come from files, models and servers: no markup, no emoji codes, no
    control characters of theirs.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(clean_text(text), **options)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            segment if segment.control else Segment(escape_controls(segment.text), segment.style)
            for segment in buffer
        )


def make_console(**options: Any) -> Console:
    """Return a console that prints texts as they are."""
    return PlainConsole(**{"markup": False, "emoji": False, **options})
