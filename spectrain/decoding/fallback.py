"""How rounds run: compiled and captured, captured as they are, or one by one; where one way fails the next, with a word.

One place for what is scored, chatted with and measured, so that all of them fall in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal, TypeVar

import torch

from spectrain.errors import UserError, describe_error
from spectrain.models.device import synchronize_device

ExecutionMode = Literal["compiled", "captured", "eager"]
EXECUTION_MODES: tuple[ExecutionMode, ...] = ("compiled", "captured", "eager")
COMPILE_BACKENDS: dict[ExecutionMode, str | None] = {
    "compiled": "auto",
    "captured": None,
    "eager": None,
}  # as `Captured` takes them
Result = TypeVar("Result")


class Fallback:
    """The way that everything that shares this runs by, so that what is compared goes on alike."""

    def __init__(self, device: torch.device, last_mode: ExecutionMode = "eager", reports_failures: bool = True) -> None:
        self.device, self.last_mode, self.reports_failures = device, last_mode, reports_failures
        self.mode: ExecutionMode = EXECUTION_MODES[0]
        self.failures: dict[ExecutionMode, str] = {}  # why each way that was left did not run

    def run(self, attempt: Callable[[ExecutionMode], Result]) -> Result:
        """What an attempt gives, by the first way from here on that runs. What the user can mend is raised, and so is what the
        last way fails with; an error that has left the GPU unusable is raised by waiting for it."""
        while True:
            try:
                return attempt(self.mode)
            except UserError:
                raise
            except Exception as error:
                if self.mode == self.last_mode:
                    raise
                synchronize_device(self.device)
                self._step_down(describe_error(error))

    def _step_down(self, why: str) -> None:
        left, self.mode = self.mode, EXECUTION_MODES[EXECUTION_MODES.index(self.mode) + 1]
        self.failures[left] = why
        if self.reports_failures:
            print(f"rounds go on {self.mode}, for {left} they failed: {why}", file=sys.stderr)
