"""Writes checkpoints, beside the training where a GPU trains: the tensors are copied to the host
first, and a thread writes the copies while the next steps run.

A checkpoint is a folder that is renamed when it is complete, so a kill in the midst of a write
leaves the checkpoint before it.
"""

import threading
from collections.abc import Callable


class CheckpointWriter:
    """Writes one checkpoint at a time."""

    def __init__(self, in_background: bool) -> None:
        self.in_background = in_background
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start_write(self, write: Callable[[], None]) -> None:
        """Write a checkpoint by calling `write`, after the one before it; without a background,
        return when it is written.
        """
        self.wait_for_write()
        if not self.in_background:
            write()
            return
        # The interpreter waits for the thread at its end, so that a checkpoint is completed.
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint")
        self._thread.start()

    def wait_for_write(self) -> None:
        """Wait for the checkpoint that is being written; raise the error that ended it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error
