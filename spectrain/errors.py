"""Exceptions that end a command with one sentence instead of a traceback, and suggestions of
valid names.
"""

import difflib
import signal
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from json import JSONDecodeError
from typing import Any, ParamSpec, TypeVar

from spectrain.output.text import clean_line, mask_secrets

P = ParamSpec("P")
T = TypeVar("T")


class UserError(ValueError):
    """A mistake that the user can correct. The message is one sentence: what, where and how; the
    exit status is 2.
    """

    def __str__(self) -> str:
        return clean_line(super().__str__())


class RunError(RuntimeError):
    """A run that failed although its settings are valid. The message is one sentence; the exit
    status is 1.
    """

    def __str__(self) -> str:
        return clean_line(super().__str__())


# What shells add to the number of a signal that ended a command.
SIGNAL_STATUS = 128
# The class of what fails in a library written in Rust, which is no Exception.
RUST_FAILURE = "PanicException"


class RunInterrupted(Exception):
    """A run that a signal stopped, after it saved itself; `status` is the exit status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    def interrupt_whole(self, message: str) -> "RunInterrupted":
        """Return the interruption of a command of which this run was a part. A training that
        SIGTERM has ended is saved and ends with 0, but the command around it is not finished.
        """
        return RunInterrupted(message, self.status or SIGNAL_STATUS + signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """A signal that asked this command to end; `status` is the exit status."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number
        self.status = SIGNAL_STATUS + number


def is_network_error(error: BaseException) -> bool:
    """Tell whether a server could not be reached. The library that asks the hub has another name in
    each of its releases, so the names of classes are compared.
    """
    names = {"TransportError", "ConnectionError"}
    return any(kind.__name__ in names for kind in type(error).__mro__)


def first_line(error: BaseException) -> str:
    """Return the first line of another library's or the system's error, for use in a message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def explain_missing_module(error: BaseException | None) -> str | None:
    """Return one sentence for an error that a Python module of another project is missing, which
    may be the cause of this one; None for any other error.
    """
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            module = error.name.partition(".")[0]
            if module == "spectrain":
                return None
            return (
                f"the Python module {module} is missing in {sys.prefix}; install spectrain again "
                "there with all that it requires"
            )
        error = error.__cause__ or error.__context__
    return None


def describe_violation(error: Any) -> str:
    """Return the first fault of pydantic's ValidationError: where in a file's content it is, and
    what it is.
    """
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'its content'}: {first['msg'].lower()}"


def describe_json_error(error: ValueError) -> str:
    """Return why a text is not JSON, without the place in the text."""
    return error.msg if isinstance(error, JSONDecodeError) else first_line(error)


def describe_error(error: BaseException) -> str:
    """Describe an error in one line of at most about 300 characters, without secrets; a longer
    message loses its middle.
    """
    message = " ".join(mask_secrets(str(error)).split())
    if len(message) > 300:
        message = f"{message[:100]} ... {message[-195:]}"
    return f"{type(error).__name__}: {message}"


MAX_LISTED = 60  # options that a message lists


def explain_calls(function: Callable[P, T]) -> Callable[P, T]:
    """Let a call that leaves out a required argument of a function, or gives one that it does not
    have, raise a UserError.
    """
    from inspect import signature as read_signature

    signature = read_signature(function)
    taken = ", ".join(
        f"**{name}" if entry.kind is entry.VAR_KEYWORD else name
        for name, entry in signature.parameters.items()
        if name not in ("self", "cls")
    )

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UserError(f"{function.__name__}: {error}; its arguments are {taken}") from error
        return function(*args, **kwargs)

    return call


def suggest_nearest(name: str, options: Iterable[str]) -> str:
    """Name the valid options closest to a wrong name, for an error message."""
    options = sorted(options)
    if not options:
        return "there are none at all"
    close = difflib.get_close_matches(name.lower(), options, n=3, cutoff=0.5)
    if len(close) == 1:
        return f"the nearest is {close[0]}"
    if not close and len(options) > MAX_LISTED:
        return f"there are {len(options)}, which --help lists"
    return f"the nearest are {', '.join(close)}" if close else f"valid are {', '.join(options)}"
