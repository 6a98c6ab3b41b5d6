"""Every limit of the proxy and of this project's engine, and everything that is sent or tried
again.

docs/follow.md shows both as tables, which a test compares with these constants.
"""

from __future__ import annotations

from dataclasses import dataclass

from .settings import ListenSettings

# Requests as they come in

HEAD_SECONDS = 10.0
"""Seconds from the first byte, or from a new connection, to the end of a request's headers."""
PAUSE_SECONDS = 10.0
"""Longest pause between two parts of a body."""
BODY_SECONDS = 60.0
"""Seconds for a whole body."""
IDLE_SECONDS = 5
"""Seconds that a connection without a request is kept after an answer."""
MAX_CONNECTIONS = 8192
UNREAD_SECONDS = 600.0
"""Seconds that a client may leave an answer unread once the buffers are full."""
MAX_INCOMPLETE = 256
"""Connections whose request is not complete; beyond these, the one that has waited longest is
closed.
"""
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 2**10
MAX_HEAD_BYTES = 2**16
"""Bytes of a request beside its body from which a connection is closed, beyond what one read
holds (256 KiB).
"""
BYTES_PER_BODY_BYTE = 8
"""Bytes on the wire per byte of a body: chunks of one byte take six."""
MAX_DROPPED_BYTES = 64 * 2**20
"""Bytes of a refused body that are read, so that its client gets the answer."""
MAX_PATH_BYTES = 2048
MAX_MODEL_CHARACTERS = 512

# What waits to be recorded

MAX_WAITING_EXCHANGES = 256
MAX_WAITING_BYTES = 64 * 2**20

# Requests on their way to a server

CONNECT_SECONDS = 10.0
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 3.2
"""The pause before another attempt doubles from the first one to the longest one."""
MAX_SENDS = 3
"""Times that a request is sent whose server drops it before an answer."""

# This project's engine

MAX_ENGINE_REQUESTS = 256
MAX_PROMPT_CHARACTERS = 2_000_000
"""A tokenizer takes seconds for so many."""
MAX_MESSAGES = 1000
DEFAULT_TOKENS = 64

# What the loop of follow repeats

TICK_SECONDS = 0.2
SAVE_SECONDS = 10.0
CHECK_SECONDS = 5.0
DRAIN_SECONDS = 30
"""Seconds that open requests get when the proxy stops."""


@dataclass(frozen=True)
class Limit:
    """A limit, and what becomes of a request that exceeds it."""

    subject: str
    value: str
    beyond: str


@dataclass(frozen=True)
class Retry:
    """Something that is tried again: how often, and after which pause."""

    subject: str
    attempts: str
    pause: str


def format_bytes(count: int) -> str:
    """Return a number of bytes in its largest binary unit."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count % 2**power == 0:
            return f"{count // 2**power} {unit}"
    return f"{count} bytes"


def list_limits() -> list[Limit]:
    """Return all limits of requests, with the defaults of those that are settings."""
    settings = ListenSettings()
    return [
        Limit("headers of a request", f"{HEAD_SECONDS:g} s", "408"),
        Limit("pause within a body", f"{PAUSE_SECONDS:g} s", "408"),
        Limit("a whole body", f"{BODY_SECONDS:g} s", "408"),
        Limit(
            "connections whose request is not complete",
            f"{MAX_INCOMPLETE}",
            "408 for the one that has waited longest",
        ),
        Limit(
            "all connections",
            f"{MAX_CONNECTIONS:,}, and half of the files that this process may open",
            "503",
        ),
        Limit(
            "a connection without a request, after an answer",
            f"{IDLE_SECONDS} s",
            "the connection is closed",
        ),
        Limit(
            "an answer that its client does not read",
            f"{UNREAD_SECONDS:g} s",
            "the connection is closed",
        ),
        Limit("number of headers", f"{MAX_HEADERS}", "431"),
        Limit(
            "bytes of headers",
            format_bytes(MAX_HEADER_BYTES),
            f"431, from {format_bytes(MAX_HEAD_BYTES)} on 400",
        ),
        Limit("bytes of a path", f"{MAX_PATH_BYTES}", "404"),
        Limit("characters of the name of a model", f"{MAX_MODEL_CHARACTERS}", "400"),
        Limit(
            "body of a request",
            f"`follow.max_body_bytes`, {format_bytes(settings.max_body_bytes)}",
            "413",
        ),
        Limit(
            "rest of a body that is refused, which is read and dropped",
            format_bytes(MAX_DROPPED_BYTES),
            "the connection is closed",
        ),
        Limit(
            "bodies and recorded answers of all open requests",
            f"`follow.max_total_bytes`, {format_bytes(settings.max_total_bytes)}",
            "503; an answer is not recorded",
        ),
        Limit(
            "complete requests that are open",
            f"`follow.max_requests`, {settings.max_requests}",
            "503",
        ),
        Limit(
            "request with its answer that is recorded",
            f"`follow.max_record_bytes`, {format_bytes(settings.max_record_bytes)}",
            "it is only passed on",
        ),
        Limit(
            "requests that wait to be recorded",
            f"{MAX_WAITING_EXCHANGES} of {format_bytes(MAX_WAITING_BYTES)} together",
            "the oldest is dropped",
        ),
        Limit(
            "wait for a server that is started again",
            f"`follow.wait_seconds`, {settings.wait_seconds:g} s",
            "502",
        ),
        Limit("`server=spectrain`: requests that are open", f"{MAX_ENGINE_REQUESTS}", "503"),
        Limit(
            "`server=spectrain`: characters of a prompt",
            f"{MAX_PROMPT_CHARACTERS:,}, and what the context can hold",
            "400",
        ),
        Limit("`server=spectrain`: messages of a prompt", f"{MAX_MESSAGES:,}", "400"),
    ]


def list_retries() -> list[Retry]:
    """Return everything that is tried again, and what never is."""
    pauses = f"{FIRST_PAUSE_SECONDS:g} s, doubled up to {LONGEST_PAUSE_SECONDS:g} s"
    return [
        Retry(
            "a request whose server cannot be connected to, so that nothing was sent",
            "until `follow.wait_seconds`",
            pauses,
        ),
        Retry(
            (
                "a request that its server drops before any part of its answer was passed on, of "
                "the routes that only compute or read"
            ),
            f"sent {MAX_SENDS} times at most",
            pauses,
        ),
        Retry("the same of `/v1/responses`, which stores what it answers", "never", "-"),
        Retry(
            "a GET on a kept connection that the server has just closed",
            "once more beside these",
            "none",
        ),
        Retry("a request of which a part of the answer was passed on", "never", "-"),
        Retry("a request that its server answered, with whatever status", "never", "-"),
        Retry(
            "a swap that the server refuses or does not answer",
            "never; the ledger says `not swapped`",
            "-",
        ),
        Retry(
            "sending the active candidate to a server that says it drafts with another one",
            "until it is served",
            f"{CHECK_SECONDS:g} s",
        ),
        Retry(
            "starting a server that follow had started and that ended by itself",
            "each time that it ends; a start that fails is not repeated",
            f"{CHECK_SECONDS:g} s",
        ),
        Retry(
            "a candidate that failed or was not promoted",
            "a new one is trained",
            "`follow.pause_seconds`",
        ),
        Retry("a repeated answer that checks a swap (`follow.shadow`)", "never", "-"),
        Retry(
            "writing decisions, conversations and the status on a full disk",
            "until it succeeds",
            f"{SAVE_SECONDS:g} s",
        ),
        Retry("anything in `server=spectrain`", "never", "-"),
    ]


def format_tables() -> str:
    """Return the tables of limits and of retries as Markdown."""
    lines = ["| limit | value | beyond it |", "|---|---|---|"]
    lines += [f"| {row.subject} | {row.value} | {row.beyond} |" for row in list_limits()]
    lines += ["", "| what is tried again | how often | pause |", "|---|---|---|"]
    lines += [f"| {row.subject} | {row.attempts} | {row.pause} |" for row in list_retries()]
    return "\n".join(lines)
