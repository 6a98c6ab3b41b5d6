"""Signals that let a training end its step, save itself and stop."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopSignals:
    """While it is entered, SIGTERM and the first SIGINT are only recorded, so that the current
    step can end.
    """

    def __init__(self) -> None:
        self.stop_signal: int | None = None
        self.previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self.previous_handlers = {
                number: signal.signal(number, self._record_signal)
                for number in (signal.SIGTERM, signal.SIGINT)
            }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.stop_signal is not None:
            # The second SIGINT stops at once.
            raise KeyboardInterrupt
        self.stop_signal = self.stop_signal or number
