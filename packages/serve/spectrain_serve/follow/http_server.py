"""Runs an ASGI application at an address, in a thread with its own event loop, within limits of
size and time.

A connection waits while its request is not complete: for headers, then for the body. How long each
may take is in `limits.py`.
"""

from __future__ import annotations

import asyncio
import resource
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from typing import Any, Literal, TypeVar, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from spectrain.errors import RunError

from .bodies import Receive, Scope, Send, format_error, send_error
from .limits import (
    BODY_SECONDS,
    BYTES_PER_BODY_BYTE,
    DRAIN_SECONDS,
    HEAD_SECONDS,
    IDLE_SECONDS,
    MAX_CONNECTIONS,
    MAX_HEAD_BYTES,
    MAX_INCOMPLETE,
    PAUSE_SECONDS,
    UNREAD_SECONDS,
)

Result = TypeVar("Result")
LOOK_SECONDS = 0.5
"""Seconds between two looks for requests that take too long."""
MAX_OPEN_FILES = 2**14


class IncompleteRequests:
    """The connections of a server whose request is not complete, the one that has waited longest
    first.
    """

    def __init__(self) -> None:
        self.connections: dict[BoundedHttpProtocol, None] = {}
        self.timer: asyncio.TimerHandle | None = None

    def add(self, connection: BoundedHttpProtocol) -> None:
        """Add a connection. Where there are too many, the one that has waited longest is
        refused, so that others get in.
        """
        self.connections.setdefault(connection)
        if len(self.connections) > MAX_INCOMPLETE:
            oldest = next(iter(self.connections))
            oldest.refuse_incomplete(
                f"the request was not complete while more than {MAX_INCOMPLETE} others were not"
            )
        if self.timer is None:
            self.timer = connection.loop.call_later(LOOK_SECONDS, self.refuse_late, connection.loop)

    def remove(self, connection: BoundedHttpProtocol) -> None:
        """Remove a connection whose request is complete, or that has ended."""
        self.connections.pop(connection, None)

    def refuse_late(self, loop: asyncio.AbstractEventLoop) -> None:
        """Refuse the requests that take too long, and look again later as long as there are
        others.
        """
        now = time.monotonic()
        for connection in [*self.connections]:
            connection.check_time(now)
        self.timer = (
            loop.call_later(LOOK_SECONDS, self.refuse_late, loop) if self.connections else None
        )


class BoundedHttpProtocol(HttpToolsProtocol):
    """Uvicorn's fast parser, which by itself would collect headers and wait for the rest of a
    request without end.
    """

    def __init__(
        self, *arguments: Any, incomplete: IncompleteRequests, max_connections: int, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.incomplete, self.max_connections = incomplete, max_connections
        self.phase: Literal["head", "body", "complete"] = "complete"
        # When the phase began, and when the last bytes came.
        self.began = self.last_read = time.monotonic()
        # Bytes of the request on the wire after the read in which it began, those of its body, and
        # those of the last read.
        self.num_bytes = self.num_body_bytes = self.read_size = 0
        self.unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        if len(self.connections) > self.max_connections:
            self.write_error(
                503,
                "Service Unavailable",
                f"{self.max_connections} connections are open; try again later",
            )
            self.transport.close()
            return
        self.begin_phase("head")

    def connection_lost(self, exc: Exception | None) -> None:
        self.incomplete.remove(self)
        self.stop_unread_timer()
        super().connection_lost(exc)

    # Requests

    def begin_phase(self, phase: Literal["head", "body"]) -> None:
        """Wait for the headers or for the body of a request."""
        self.phase = phase
        self.began = time.monotonic()
        self.last_read = self.began
        self.incomplete.add(self)

    @property
    def answers_earlier(self) -> bool:
        """Return whether an earlier request of this connection is being answered."""
        return self.phase != "body" and self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        self.last_read = time.monotonic()
        self.read_size = len(data)
        if self.phase == "complete" and not self.answers_earlier:
            self.begin_phase("head")
        super().data_received(data)
        if self.phase == "complete" or self.transport.is_closing():
            return
        self.num_bytes += len(data)
        if self.num_bytes > MAX_HEAD_BYTES + BYTES_PER_BODY_BYTE * self.num_body_bytes:
            self.send_400_response("The headers are too long.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.num_bytes = -self.read_size
        self.num_body_bytes = 0
        if self.phase == "complete":
            self.begin_phase("head")

    def on_headers_complete(self) -> None:
        application = self.app
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        # HTTP/1.1 has exactly one Host header (RFC 9112, section 3.2), and 1.0 may have none.
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() != "1.0"):
            self.app = refuse_hosts
        super().on_headers_complete()
        self.app = application
        # Fields after a body (trailers) are no headers: they were not checked with these.
        self.headers = []
        self.begin_phase("body")

    def on_body(self, body: bytes) -> None:
        self.num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.phase = "complete"
        self.incomplete.remove(self)

    def check_time(self, now: float) -> None:
        """Refuse the request if its headers, its body or a pause within it take too long."""
        if self.flow.read_paused or self.answers_earlier:
            # It is not the client who waits.
            self.began = self.last_read = now
        elif self.phase == "head" and now - self.began > HEAD_SECONDS:
            self.refuse_incomplete(f"the headers did not end within {HEAD_SECONDS:g} seconds")
        elif self.phase == "body" and now - self.last_read > PAUSE_SECONDS:
            self.refuse_incomplete(f"the body did not go on for {PAUSE_SECONDS:g} seconds")
        elif self.phase == "body" and now - self.began > BODY_SECONDS:
            self.refuse_incomplete(f"the body did not end within {BODY_SECONDS:g} seconds")

    def refuse_incomplete(self, message: str) -> None:
        """Answer status 408 if no answer has begun, and close the connection."""
        self.incomplete.remove(self)
        if self.transport.is_closing():
            return
        if not self.answers_earlier and not (self.phase == "body" and self.cycle.response_started):
            self.write_error(408, "Request Timeout", message)
        self.transport.close()

    def write_error(self, status: int, name: str, message: str) -> None:
        """Write the answer to a request that has not reached the application."""
        content = format_error(status, message)
        head = (
            f"HTTP/1.1 {status} {name}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        )
        self.transport.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)

    # Answers

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread_timer = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stop_unread_timer()

    def stop_unread_timer(self) -> None:
        """Forget the time that the client leaves an answer unread."""
        if self.unread_timer is not None:
            self.unread_timer.cancel()
            self.unread_timer = None


async def refuse_hosts(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request whose headers do not name one host."""
    await send_error(send, 400, "the headers name no host, or several; send one Host header")


def make_http_server(application: Any, host: str, port: int) -> uvicorn.Server:
    """Return a server for an ASGI application. Its parser bounds the size of headers and the
    time of a request.
    """
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = (
        MAX_CONNECTIONS
        if open_files == resource.RLIM_INFINITY
        else min(MAX_CONNECTIONS, open_files // 2)
    )
    protocol: Any = partial(
        BoundedHttpProtocol, incomplete=IncompleteRequests(), max_connections=most
    )
    config = uvicorn.Config(
        application,
        host=host,
        port=port,
        http=protocol,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    return uvicorn.Server(config)


def allow_open_files() -> None:
    """Raise this process's limit of open files: a request takes a connection to its client and
    one to its server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class HttpThread:
    """A server that runs in a thread, and the event loop in it."""

    def __init__(
        self, server: uvicorn.Server, connections: Callable[[], AbstractAsyncContextManager[None]]
    ) -> None:
        self.server, self.connections = server, connections
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def _run(self) -> None:
        runner = (
            asyncio.Runner(loop_factory=self.server.config.get_loop_factory())
            if hasattr(asyncio, "Runner")
            else None
        )
        if runner is None:
            asyncio.run(self._serve())
            return
        with runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        async with self.connections():
            # Signals belong to the main thread.
            await self.server._serve()

    def run(self, work: Coroutine[Any, Any, Result], seconds: float | None = None) -> Result:
        """Run a coroutine in the event loop of the server, and return its result."""
        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function in the event loop of the server, and return its result."""

        async def run() -> Result:
            return function()

        return self.run(run())


@contextmanager
def serve_in_thread(
    application: Any,
    host: str,
    port: int,
    connections: Callable[[], AbstractAsyncContextManager[None]],
) -> Iterator[HttpThread]:
    """Serve an application while the block runs; a RunError says that the address is not free."""
    thread = HttpThread(make_http_server(application, host, port), connections)
    thread.thread.start()
    while not thread.server.started and thread.thread.is_alive():
        thread.thread.join(0.02)
    if not thread.server.started:
        raise RunError(
            f"follow.listen={host}:{port}: this address cannot be listened at; give another one"
        )
    try:
        yield thread
    finally:
        thread.server.should_exit = True
        thread.thread.join(DRAIN_SECONDS + 5)
