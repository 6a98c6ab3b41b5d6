"""SIGTERM and SIGHUP end a command as Ctrl-C does: what is half written is removed, and what was
started is stopped.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from spectrain.errors import Terminated

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
# Seconds after which a signal is sent again whose exception Python has ignored.
REPEAT_SECONDS = 0.01


@contextmanager
def raise_terminated() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise Terminated until the end of the block. A signal that is ignored,
    as nohup ignores SIGHUP, stays ignored.

    Python ignores an exception in the callback of a weak reference. Such a signal, or a Ctrl-C, is
    sent again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process = os.getpid()

    def raise_error(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            raise Terminated(number)
        # A process that was forked from this one ends as it would without a handler.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    hook = sys.unraisablehook

    def send_again(ignored: Any) -> None:
        error = ignored.exc_value
        if isinstance(error, KeyboardInterrupt):
            number = error.number if isinstance(error, Terminated) else signal.SIGINT
            threading.Timer(REPEAT_SECONDS, os.kill, (os.getpid(), number)).start()
        else:
            hook(ignored)

    raised = [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    for number in raised:
        signal.signal(number, raise_error)
    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number in raised:
            signal.signal(number, signal.SIG_DFL)
