"""The proxy: an ASGI application that passes requests on byte by byte, and hands copies of some to the recorder.

What records, learns and swaps runs elsewhere; nothing of it can break a request. The memory of a request is bounded: its body
by `max_body_bytes`, its answer by what the connections buffer and, where it is recorded, by `max_record_bytes`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from yarl import URL

from .exchange import Exchange
from .requests import KIND_HEADER, SWITCH_HEADER, Refusal, check_headers, check_path, parse_body, select_passed_headers
from .settings import ListenSettings
from .upstream import Upstream, UpstreamSwitch

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Page = Callable[[], tuple[str, bytes]]
"""Returns the content type and the content of a page of the proxy's own."""

RETRY_SECONDS = 0.2
"""Pause between two attempts to reach a server that does not answer."""
BIG_BODY = 2**16
"""A larger body is parsed in a thread, so that other requests go on meanwhile."""
MAX_WAITING_EXCHANGES = 256
CONNECT_SECONDS = 10.0
# Headers that the client library would add by itself.
SKIPPED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type", "Connection")


@dataclass
class ProxyCounters:
    """What the proxy has done since its start."""

    requests: int = 0
    failed: int = 0
    refused: int = 0
    aborted: int = 0
    retried: int = 0
    recorded: int = 0
    # Exchanges that were not recorded because the recorder was behind.
    skipped: int = 0
    num_open: int = 0


@dataclass
class Recorder:
    """Exchanges on their way to the thread that learns. Adding one never waits and never fails."""

    sample: float
    exchanges: deque[Exchange] = field(default_factory=lambda: deque(maxlen=MAX_WAITING_EXCHANGES))
    generator: random.Random = field(default_factory=random.Random)

    def selects(self) -> bool:
        """Return whether the next request is recorded."""
        return self.generator.random() < self.sample

    def take_all(self) -> list[Exchange]:
        """Return the exchanges that wait, and remove them."""
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self.exchanges.popleft())
        return taken


class Proxy:
    """Passes requests on to the active server."""

    def __init__(self, settings: ListenSettings, servers: UpstreamSwitch, recorder: Recorder) -> None:
        self.settings, self.servers, self.recorder = settings, servers, recorder
        # The proxy's own pages by path.
        self.pages: dict[str, Page] = {}
        self.counters = ProxyCounters()
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def open_connections(self) -> AsyncIterator[None]:
        """Keep connections to the servers in the running event loop."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            skip_auto_headers=SKIPPED,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        ) as session:
            self._session = session
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # A connection of another kind, such as a web socket, is closed.
            await send({"type": "websocket.close"})
            return
        if scope["method"] == "GET" and (page := self.pages.get(scope["path"])) is not None:
            content_type, content = await asyncio.to_thread(page)
            await send_response(send, 200, content, content_type)
            return
        self.counters.requests += 1
        self.counters.num_open += 1
        try:
            await self._handle(scope, receive, send)
        except Refusal as refusal:
            self.counters.refused += 1
            await send_error(send, refusal.status, str(refusal))
        finally:
            self.counters.num_open -= 1

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.settings.requests is not None:
            raise Refusal(404, "follow reads request logs, so it passes no requests on")
        if self.counters.num_open > self.settings.max_requests:
            raise Refusal(503, f"{self.settings.max_requests} requests are open; try again later")
        raw_path = scope.get("raw_path") or scope["path"].encode()
        check_path(scope["path"], raw_path)
        check_headers(scope["headers"])
        body = await read_body(scope, receive, self.settings.max_body_bytes)
        is_recorded_route = scope["method"] == "POST" and scope["path"] in self.settings.routes
        if is_recorded_route:
            await (asyncio.to_thread(parse_body, body) if len(body) > BIG_BODY else parse_in_place(body))
        headers = dict(scope["headers"])
        tap = None
        if is_recorded_route and headers.get(SWITCH_HEADER) != b"off" and self.recorder.selects():
            tap = AnswerTap(self.settings.max_record_bytes - len(body))
        status = await self._pass_on(scope, body, AnswerChannel(receive, send, tap))
        if tap is not None and status == 200 and tap.is_complete:
            self._record(scope["path"], body, tap, headers.get(KIND_HEADER))

    def _record(self, route: str, body: bytes, tap: AnswerTap, kind: bytes | None) -> None:
        self.counters.recorded += 1
        self.counters.skipped += len(self.recorder.exchanges) == MAX_WAITING_EXCHANGES
        name = None if kind is None else kind.decode("ascii", "replace")
        self.recorder.exchanges.append(Exchange(route, body, b"".join(tap.parts), name))

    async def _pass_on(self, scope: Scope, body: bytes, channel: AnswerChannel) -> int | None:
        """Pass a request on and its answer back; return the status, or None where the client has gone."""
        request, is_gone = asyncio.current_task(), False

        async def watch_client() -> None:
            nonlocal is_gone
            await channel.wait_for_disconnect()
            # The end of an answer counts as a disconnect too.
            if request is not None and not channel.has_ended:
                is_gone = True
                request.cancel()

        watcher = asyncio.ensure_future(watch_client())
        try:
            return await self._answer(scope, body, channel)
        except asyncio.CancelledError:
            if not is_gone:
                raise
            self.counters.aborted += 1
            return None
        finally:
            watcher.cancel()

    async def _answer(self, scope: Scope, body: bytes, channel: AnswerChannel) -> int:
        """Return the status of the answer that was passed back. A server that is gone is waited for, unless it has begun to
        answer."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.wait_seconds
        while True:
            upstream = self.servers.active
            upstream.num_open += 1
            try:
                return await self._request(upstream, scope, body, channel)
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                if channel.has_begun:
                    # The client sees a broken answer, as it would without the proxy.
                    self.counters.failed += 1
                    raise ConnectionAbortedError("the server broke off its answer") from error
                if loop.time() >= deadline:
                    self.counters.failed += 1
                    await send_error(channel.send, 502, "the server does not answer")
                    return 502
                self.counters.retried += 1
            finally:
                upstream.num_open -= 1
            await asyncio.sleep(RETRY_SECONDS)

    async def _request(self, upstream: Upstream, scope: Scope, body: bytes, channel: AnswerChannel) -> int:
        assert self._session is not None, "requests are answered inside `open_connections`"
        query = scope["query_string"].decode("latin-1")
        path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1").partition("?")[0]
        url = URL(upstream.root + path + (f"?{query}" if query else ""), encoded=True)
        passed = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in select_passed_headers(scope["headers"])]
        headers = [(name, value) for name, value in passed if name not in ("host", "content-length")]
        async with self._session.request(
            scope["method"], url, data=body or None, headers=headers, allow_redirects=False
        ) as response:
            raw = [*select_passed_headers((name.lower(), value) for name, value in response.raw_headers)]
            async for chunk in response.content.iter_any():
                # Headers wait for the first part, because a request whose answer has not begun can be repeated.
                if not channel.has_begun:
                    await channel.begin(response.status, raw)
                await channel.send_chunk(chunk)
            if not channel.has_begun:
                await channel.begin(response.status, raw)
            await channel.end()
            return response.status


class AnswerTap:
    """Keeps a copy of an answer, up to a number of bytes."""

    def __init__(self, room: int) -> None:
        self.room, self.parts, self.is_complete = room, list[bytes](), False

    def add(self, chunk: bytes) -> None:
        """Keep a part of the answer, or drop all parts where there is no room."""
        self.room -= len(chunk)
        if self.room >= 0:
            self.parts.append(chunk)
        else:
            self.parts.clear()

    def finish(self) -> None:
        """Mark the copy as complete, if there was room for all of it."""
        self.is_complete = self.room >= 0


@dataclass
class AnswerChannel:
    """The way of an answer back to the client."""

    receive: Receive
    send: Send
    tap: AnswerTap | None
    has_begun: bool = False
    has_ended: bool = False

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the status and the headers."""
        self.has_begun = True
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def send_chunk(self, chunk: bytes) -> None:
        """Send a part of the answer; this waits for a client that reads slowly."""
        await self.send({"type": "http.response.body", "body": chunk, "more_body": True})
        if self.tap is not None:
            self.tap.add(chunk)

    async def end(self) -> None:
        """End the answer."""
        self.has_ended = True
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})
        if self.tap is not None:
            self.tap.finish()

    async def wait_for_disconnect(self) -> None:
        """Wait until the client has gone."""
        while (await self.receive())["type"] != "http.disconnect":
            pass


async def parse_in_place(body: bytes) -> None:
    """Check a small body."""
    parse_body(body)


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the body of a request; raise a Refusal for one that is too large, before it is read where its length is given."""
    declared = dict(scope["headers"]).get(b"content-length")
    if declared is not None and (not declared.isdigit() or int(declared) > limit):
        raise Refusal(413 if declared.isdigit() else 400, f"the body is larger than {limit} bytes")
    parts, size = list[bytes](), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal(400, "the request broke off")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise Refusal(413, f"the body is larger than {limit} bytes")
        if not message.get("more_body"):
            return b"".join(parts)


async def send_response(send: Send, status: int, content: bytes, content_type: str) -> None:
    """Send a whole response."""
    headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(content)).encode())]
    if status in (400, 413, 431):
        # What is left of the request is not read.
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": False})


async def send_error(send: Send, status: int, message: str) -> None:
    """Send an error in OpenAI's form."""
    content = {"error": {"message": message, "type": "spectrain_follow", "code": status}}
    await send_response(send, status, json.dumps(content).encode(), "application/json")
