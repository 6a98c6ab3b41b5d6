"""Signals that ask a training to stop."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopSignals:
    """While it is entered, SIGTERM and the first SIGINT are only noted, so that the step that runs can end."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.asked is not None:
            raise KeyboardInterrupt  # a second time: at once
        self.asked = self.asked or number
