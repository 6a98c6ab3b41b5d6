"""How rounds run: compiled and captured, captured as they are, or one by one; where one way fails the next, with a word.

One place for what is scored, chatted with and measured, so that all of them fall in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal, TypeVar

import torch

from spectrain.errors import UserError, reason
from spectrain.models.device import wait

Way = Literal["compiled", "captured", "eager"]
WAYS: tuple[Way, ...] = ("compiled", "captured", "eager")
BACKENDS: dict[Way, str | None] = {"compiled": "auto", "captured": None, "eager": None}  # as `Captured` takes them
Found = TypeVar("Found")


class Fallback:
    """The way that everything that shares this runs by, so that what is compared goes on alike."""

    def __init__(self, device: torch.device, last: Way = "eager", says: bool = True) -> None:
        self.device, self.last, self.says = device, last, says
        self.way: Way = WAYS[0]
        self.failed: dict[Way, str] = {}  # why each way that was left did not run

    def run(self, attempt: Callable[[Way], Found]) -> Found:
        """What an attempt gives, by the first way from here on that runs. What the user can mend is raised, and so is what the
        last way fails with; an error that has left the GPU unusable is raised by waiting for it."""
        while True:
            try:
                return attempt(self.way)
            except UserError:
                raise
            except Exception as error:
                if self.way == self.last:
                    raise
                wait(self.device)
                self._step_down(reason(error))

    def _step_down(self, why: str) -> None:
        left, self.way = self.way, WAYS[WAYS.index(self.way) + 1]
        self.failed[left] = why
        if self.says:
            print(f"rounds go on {self.way}, for {left} they failed: {why}", file=sys.stderr)
