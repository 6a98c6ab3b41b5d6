"""Runs an ASGI application at an address, in a thread with its own event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from spectrain.errors import RunError

Result = TypeVar("Result")
DRAIN_SECONDS = 30
"""Seconds that open requests get when the server stops."""

MAX_HEAD_BYTES = 2**16
"""Bytes of a request's line and headers from which a connection is closed, beyond what one read holds (256 KiB)."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Uvicorn's fast parser, which by itself would collect headers without end."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # Bytes that a request has sent before the end of its headers; None once they have ended.
        self.num_head_bytes: int | None = 0

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.num_head_bytes = 0

    def on_headers_complete(self) -> None:
        self.num_head_bytes = None
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.num_head_bytes is None or self.transport.is_closing():
            return
        self.num_head_bytes += len(data)
        if self.num_head_bytes > MAX_HEAD_BYTES:
            self.send_400_response("The headers are too long.")


def make_http_server(application: Any, host: str, port: int) -> uvicorn.Server:
    """Return a server for an ASGI application. Its parser bounds the size of headers."""
    config = uvicorn.Config(
        application,
        host=host,
        port=port,
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    return uvicorn.Server(config)


class HttpThread:
    """A server that runs in a thread, and the event loop in it."""

    def __init__(self, server: uvicorn.Server, connections: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        self.server, self.connections = server, connections
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def _run(self) -> None:
        runner = asyncio.Runner(loop_factory=self.server.config.get_loop_factory()) if hasattr(asyncio, "Runner") else None
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
    application: Any, host: str, port: int, connections: Callable[[], AbstractAsyncContextManager[None]]
) -> Iterator[HttpThread]:
    """Serve an application while the block runs; a RunError says that the address is not free."""
    thread = HttpThread(make_http_server(application, host, port), connections)
    thread.thread.start()
    while not thread.server.started and thread.thread.is_alive():
        thread.thread.join(0.02)
    if not thread.server.started:
        raise RunError(f"follow.listen={host}:{port}: this address cannot be listened at; give another one")
    try:
        yield thread
    finally:
        thread.server.should_exit = True
        thread.thread.join(DRAIN_SECONDS + 5)
