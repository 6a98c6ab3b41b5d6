"""The exceptions that end a command with one sentence instead of a traceback."""


class UserError(ValueError):
    """Something the user can mend. The message is one sentence: what, where and how; the command exits with 2."""


class RunError(RuntimeError):
    """A run that failed through no mistake in its settings; one sentence too, and the command exits with 1."""


class Stopped(Exception):
    """A run that was asked to stop by a signal, and has saved itself; `status` is what to exit with."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
