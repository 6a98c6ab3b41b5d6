"""Execution modes of rounds: compiled and captured, captured only, or eager. A mode that fails is
replaced by the next one.

Scoring, chat and benchmarks share this module, so that all of them fall back in the same order and
print the reason.
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
    """Holds the execution mode of all sessions that share it, so that compared sessions run in
    the same mode.
    """

    def __init__(
        self,
        device: torch.device,
        last_mode: ExecutionMode = "eager",
        reports_failures: bool = True,
    ) -> None:
        self.device, self.last_mode, self.reports_failures = device, last_mode, reports_failures
        self.mode: ExecutionMode = EXECUTION_MODES[0]
        self.failures: dict[ExecutionMode, str] = {}  # reasons

    def run(self, attempt: Callable[[ExecutionMode], Result]) -> Result:
        """Return the result of an attempt in the first mode, from the current one on, that runs. A
        UserError and the error of the last mode are raised. Waiting for the device raises an error
        that has left the GPU unusable."""
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
        left = self.mode
        self.mode = EXECUTION_MODES[EXECUTION_MODES.index(self.mode) + 1]
        self.failures[left] = why
        if self.reports_failures:
            print(f"rounds go on {self.mode}, for {left} they failed: {why}", file=sys.stderr)
