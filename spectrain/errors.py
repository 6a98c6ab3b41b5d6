"""The exceptions that end a command with one sentence instead of a traceback, and how they name what was meant."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user can mend. The message is one sentence: what, where and how; the command exits with 2."""


class RunError(RuntimeError):
    """A run that failed through no mistake in its settings; one sentence too, and the command exits with 1."""


class RunInterrupted(Exception):
    """A run that was asked to stop by a signal, and has saved itself; `status` is what to exit with."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def first_line(error: BaseException) -> str:
    """What another library or the system says of its error, for a sentence of ours."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def describe_error(error: BaseException) -> str:
    """What went wrong, in one line, for a row or a word of ours."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def suggest_nearest(name: str, options: Iterable[str]) -> str:
    """The valid names closest to a wrong one, for an error message."""
    options = sorted(options)
    if not options:
        return "there are none at all"
    close = difflib.get_close_matches(name.lower(), options, n=3, cutoff=0.5)
    if len(close) == 1:
        return f"the nearest is {close[0]}"
    return f"the nearest are {', '.join(close)}" if close else f"valid are {', '.join(options)}"
