"""The output of `spectrain chat`: an answer as text while its rounds arrive, its speed, and how
both are shown.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from tokenizers.decoders import DecodeStream

from spectrain.decoding.generation import Generation
from spectrain.models.target import Target
from spectrain.output.console import make_console

# The colours of successive rounds.
ROUND_COLOURS = ("green", "cyan", "magenta", "yellow", "blue")
# Seconds between two updates of the terminal: more frequent ones are invisible and cost time.
REFRESH_SECONDS = 0.05


class TextPiece(NamedTuple):
    """The text that one token completes."""

    text: str
    round: int  # 0: the token that the prefill gives
    # Whether the drafter proposed it; the last token of each round is the target's own.
    is_drafted: bool


class TextStream:
    """An answer as text while its rounds arrive. A character is withheld until all of its bytes
    are there.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.decoder = DecodeStream(skip_special_tokens=False)
        # The tokens of the answer, without stop tokens.
        self.tokens: list[int] = []
        self.num_read = 0  # tokens of the generation
        self.text = ""

    def read_pieces(self, generation: Generation) -> list[TextPiece]:
        """Return what is new since the last call."""
        origins = [(0, False)]
        origins += [
            (turn, step < count)
            for turn, count in enumerate(generation.round_lengths, 1)
            for step in range(1, count + 1)
        ]
        new = list(zip(generation.output, origins))[self.num_read :]
        self.num_read += len(new)
        return [
            TextPiece(self._decode_token(token), *origin)
            for token, origin in new
            if token not in self.target.stop_ids
        ]

    def remaining_text(self) -> str:
        """Return what is still withheld at the end: a truncated character."""
        return str(self.target.tokenizer.decode(self.tokens, clean_up_tokenization_spaces=False))[
            len(self.text) :
        ]

    def _decode_token(self, token: int) -> str:
        self.tokens.append(token)
        new = self.decoder.step(self.target.tokenizer.backend_tokenizer, token) or ""
        self.text += new
        return new


@dataclass
class DecodingSpeed:
    """The number of tokens, rounds and seconds of decoding, with or without the drafter."""

    answers: int = 0
    tokens: int = 0  # emitted by rounds
    rounds: int = 0  # forwards of the target
    seconds: float = 0.0

    def add_generation(self, generation: Generation) -> DecodingSpeed:
        self.answers += 1
        # The output is empty if the prefill was interrupted.
        self.tokens += max(0, len(generation.output) - 1)
        self.rounds += len(generation.round_lengths)
        self.seconds += generation.finish_seconds
        return self

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_second:.1f} tokens/s, {self.tokens_per_forward:.2f} tokens per "
            "forward"
        )


class PlainOutput:
    """Output without a terminal: the answer goes to stdout as it arrives, everything else to
    stderr.
    """

    def __init__(self) -> None:
        self.console = make_console(stderr=True, highlight=False, soft_wrap=True)

    @contextmanager
    def open_answer(self) -> Iterator[PlainOutput]:
        yield self
        print(flush=True)

    def show_pieces(self, pieces: list[TextPiece], status: str) -> None:
        print("".join(piece.text for piece in pieces), end="", flush=True)

    def show_note(self, text: str) -> None:
        self.console.print(text, markup=False)


class TerminalOutput(PlainOutput):
    """Output on a terminal: finished lines stay, the current line and the status line below it
    are redrawn.
    """

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextmanager
    def open_answer(self) -> Iterator[TerminalOutput]:
        self.line = Text()
        self.status = "reading"
        self.last_draw = 0.0
        self.live = Live(console=self.console, auto_refresh=False, vertical_overflow="visible")
        with self.live:
            self._draw_screen()
            try:
                yield self
            finally:
                self.status = ""
                self._draw_screen()

    def show_pieces(self, pieces: list[TextPiece], status: str) -> None:
        for piece in pieces:
            self.line.append(piece.text.replace("\x1b", ""), style=piece_style(piece))
        self.status = status
        if time.monotonic() - self.last_draw > REFRESH_SECONDS:
            self._draw_screen()

    def show_note(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False)

    def _draw_screen(self) -> None:
        """Print the lines that will not change any more above the current line."""
        *lines, last = self.line.split("\n", allow_blank=True)
        *full, self.line = last.wrap(self.console, self.console.width) or [Text()]
        below = (
            [Text(self.status, style="dim", no_wrap=True, overflow="ellipsis")]
            if self.status
            else []
        )
        # A single write avoids flicker.
        with self.console:
            if finished := [*lines, *full]:
                self.console.print(Group(*finished))
            self.live.update(Group(self.line, *below), refresh=True)
        self.last_draw = time.monotonic()


def piece_style(piece: TextPiece) -> str:
    """Return the style of a piece: the colour of its round for drafted tokens, dim and underlined
    for the target's own token."""
    return ROUND_COLOURS[piece.round % len(ROUND_COLOURS)] if piece.is_drafted else "dim underline"
