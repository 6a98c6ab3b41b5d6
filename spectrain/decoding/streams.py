"""Drafting while the target verifies on one GPU: in the same process, on a CUDA stream of its own.

A forward of the target is launched and returns before it has run; what drafts then drafts on its stream, and waits for that
stream alone when it reads its tokens. The two share nothing that either writes: the follower reads the text, which the host
knows, and the weights. On a CPU, where nothing runs by itself, the same happens one after the other, for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from spectrain.drafters.base import Drafter
from spectrain.models.target import Target

from .follower import REST, Follower, Foreseen, Wish


class Streamed:
    """Who drafts, asked as a process of its own is."""

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self.follower = Follower(drafter, target)
        self.stream: torch.cuda.Stream | None = None
        if target.device.type == "cuda":
            self.stream = torch.cuda.Stream(target.device)
            self.stream.wait_stream(torch.cuda.current_stream(target.device))  # weights are there
        self.number = 0
        self.wish: Wish | None = None  # not fulfilled yet
        self.found: tuple[list[int], bool] = ([], False)
        self.foreseen: Foreseen | None = None

    def ask(self, text: list[int], count: int, begins: int | None = None, outcomes: int = 0, drafted: bool = True) -> None:
        """Want so many tokens after a text, and no other any more; a text that begins has room for `begins` tokens."""
        self.number += 1
        self.wish = Wish(self.number, text, count, begins, outcomes, drafted)
        with self._aside():
            if begins is not None or count == REST:
                self._forget()
            if begins is not None:
                self.follower.begin(begins, count, outcomes)

    def answer(self) -> tuple[list[int], bool]:
        """The tokens that were asked for last, and whether they had been foreseen."""
        with self._aside():
            self._fulfil()
        return self.found

    def work(self) -> None:
        """Draft what is wanted while what was launched for the target runs, and behind outcomes until it has run."""
        with self._aside() as is_verified:
            self._fulfil()
            if self.foreseen is not None:
                self.foreseen.grow(is_verified)

    @contextmanager
    def _aside(self) -> Iterator[Callable[[], bool]]:
        """On the stream of its own; what it gives says whether all that was launched on the other one by now has run."""
        if self.stream is None:
            yield lambda: False
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield event.query

    def _fulfil(self) -> None:
        wish, self.wish = self.wish, None
        if wish is None or wish.count == REST:
            return
        if not wish.outcomes:
            self.found = self.follower.draft(wish.text, wish.count, lambda: False), False
            return
        drafted: list[int] | None = None if wish.drafted else []
        if self.foreseen is not None and wish.drafted:
            drafted = self.foreseen.draft(wish.text)
        self._forget()
        self.found = drafted or [], drafted is not None
        self.foreseen = self.follower.foreseen(wish, drafted, self._tell)

    def _tell(self, tokens: list[int]) -> None:
        self.found = tokens, False

    def _forget(self) -> None:
        if self.foreseen is not None:
            self.foreseen.end()
            self.foreseen = None
