"""Failures of requests to a server. This file imports no HTTP client, which would take a second
at every start.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

MALFORMED = (
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    RecursionError,
)
"""What reading a malformed answer raises."""

FailureKind = Literal["failed", "too_long", "unreachable"]


class ServerError(Exception):
    """A request that failed for good, with the reason.

    `kind` is "too_long" for a prompt beyond the context, "unreachable" if nothing answers at the
    address any more, and else "failed".
    """

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def error_text(error: Exception) -> str:
    """Return an error in one line: the network error behind the client's own, which may have no
    message.
    """
    error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


@contextmanager
def refuse_malformed(what: str) -> Iterator[None]:
    """Raise a ServerError, in one sentence, where reading `what` fails because it has another form
    than it should.
    """
    try:
        yield
    except MALFORMED as error:
        raise ServerError("failed", f"{what} is malformed ({error_text(error)})") from error
