"""The proxy: an ASGI application that passes requests on byte by byte, and hands copies of some to
the recorder.

What records, learns and swaps runs elsewhere; nothing of it can break a request. Memory is bounded:
bodies and recorded answers by `max_body_bytes` and `max_record_bytes` each and by `max_total_bytes`
together, and other answers by what the connections buffer. All limits are in `limits.py`.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from yarl import URL

from .bodies import (
    ByteBudget,
    HeldBytes,
    Receive,
    RequestReceiver,
    Scope,
    Send,
    close_other_connection,
    read_body,
    send_error,
    send_refusal,
    send_response,
)
from .control import check_control_request
from .exchange import Exchange
from .limits import (
    CONNECT_SECONDS,
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    MAX_SENDS,
    MAX_WAITING_BYTES,
    MAX_WAITING_EXCHANGES,
)
from .requests import (
    KIND_HEADER,
    SWITCH_HEADER,
    Refusal,
    Route,
    check_encoding,
    check_headers,
    find_route,
    parse_body,
    select_passed_headers,
)
from .settings import ListenSettings
from .upstream import Upstream, UpstreamSwitch

Page = Callable[[], tuple[str, bytes]]
"""Returns the content type and the content of a page of the proxy's own."""

BIG_BODY = 2**16
"""A larger body is parsed in a thread, one after the other, so that other requests go on and
memory stays bounded.
"""
KEEP_SECONDS = 4.0
"""Seconds that an idle connection to a server is kept; servers with uvicorn close theirs after
5.
"""
PAGE_HEADERS = (
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)
FINAL_STATUSES = range(200, 600)
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
    """Exchanges on their way to the thread that learns. Adding one never waits for that thread
    and never fails.
    """

    sample: float
    # Gives the time at which an exchange is recorded.
    clock: Callable[[], float] = time.monotonic
    exchanges: deque[Exchange] = field(default_factory=deque)
    generator: random.Random = field(default_factory=random.Random)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def selects(self) -> bool:
        """Return whether the next request is recorded."""
        return self.generator.random() < self.sample

    def add(self, exchange: Exchange) -> int:
        """Add an exchange, and drop the oldest ones where too many wait; return how many were
        dropped.
        """
        with self.lock:
            self.exchanges.append(exchange)
            before = len(self.exchanges)
            num_bytes = sum(waiting.num_bytes for waiting in self.exchanges)
            while len(self.exchanges) > MAX_WAITING_EXCHANGES or num_bytes > MAX_WAITING_BYTES:
                num_bytes -= self.exchanges.popleft().num_bytes
            return before - len(self.exchanges)

    def take_all(self) -> list[Exchange]:
        """Return the exchanges that wait, and remove them."""
        with self.lock:
            taken = [*self.exchanges]
            self.exchanges.clear()
        return taken


class Proxy:
    """Passes requests on to the active server."""

    def __init__(
        self, settings: ListenSettings, servers: UpstreamSwitch, recorder: Recorder
    ) -> None:
        self.settings, self.servers, self.recorder = settings, servers, recorder
        # The proxy's own pages by path, and the key without which they are not shown.
        self.pages: dict[str, Page] = {}
        self.key = ""
        self.counters = ProxyCounters()
        self.budget = ByteBudget(settings.max_total_bytes)
        self._parsing = asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def open_connections(self) -> AsyncIterator[None]:
        """Keep connections to the servers in the running event loop."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_SECONDS)
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
        if await close_other_connection(scope, send):
            return
        receiver = RequestReceiver(receive)
        try:
            if scope["method"] == "GET" and (page := self.pages.get(scope["path"])) is not None:
                check_control_request(scope, self.key)
                content_type, content = await asyncio.to_thread(page)
                await send_response(send, 200, content, content_type, headers=PAGE_HEADERS)
                return
            self.counters.requests += 1
            await self._handle(scope, receiver, send)
        except Refusal as refusal:
            self.counters.refused += 1
            await send_refusal(scope, receiver, send, refusal)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.settings.requests is not None:
            raise Refusal(404, "follow reads request logs, so it passes no requests on")
        route = find_route(
            scope["method"], scope["path"], scope.get("raw_path") or scope["path"].encode()
        )
        check_headers(scope["headers"])
        check_encoding(scope["headers"])
        is_post = scope["method"] == "POST"
        with self.budget.open() as held:
            body = await read_body(
                scope, receive, self.settings.max_body_bytes if is_post else 0, held
            )
            if is_post:
                await self._check_body(body)
            # A request is open once it is complete, so that half of one takes no place.
            if self.counters.num_open >= self.settings.max_requests:
                raise Refusal(
                    503, f"{self.settings.max_requests} requests are open; try again later"
                )
            self.counters.num_open += 1
            try:
                await self._answer_complete(scope, route, body, held, receive, send)
            finally:
                self.counters.num_open -= 1

    async def _check_body(self, body: bytes) -> None:
        if len(body) <= BIG_BODY:
            parse_body(body)
            return
        async with self._parsing:
            await asyncio.to_thread(parse_body, body)

    async def _answer_complete(
        self, scope: Scope, route: Route, body: bytes, held: HeldBytes, receive: Receive, send: Send
    ) -> None:
        """Answer a request whose body was read and checked, and record it with its answer."""
        headers = dict(scope["headers"])
        tap = None
        is_recorded_route = scope["method"] == "POST" and scope["path"] in self.settings.routes
        if is_recorded_route and headers.get(SWITCH_HEADER) != b"off" and self.recorder.selects():
            tap = AnswerTap(self.settings.max_record_bytes - len(body), held)
        status = await self._pass_on(scope, route, body, AnswerChannel(receive, send, tap))
        if tap is not None and status == 200 and tap.is_complete:
            self._record(scope["path"], body, tap, headers.get(KIND_HEADER))

    def _record(self, path: str, body: bytes, tap: AnswerTap, kind: bytes | None) -> None:
        self.counters.recorded += 1
        name = None if kind is None else kind.decode("ascii", "replace")
        exchange = Exchange(path, body, b"".join(tap.parts), name, self.recorder.clock())
        self.counters.skipped += self.recorder.add(exchange)

    async def _pass_on(
        self, scope: Scope, route: Route, body: bytes, channel: AnswerChannel
    ) -> int | None:
        """Pass a request on and its answer back; return the status, or None where client or
        server broke off.
        """
        request = asyncio.current_task()
        is_gone = False

        async def watch_client() -> None:
            nonlocal is_gone
            await channel.wait_for_disconnect()
            # The end of an answer counts as a disconnect too.
            if request is not None and not channel.has_ended:
                is_gone = True
                request.cancel()

        watcher = asyncio.ensure_future(watch_client())
        try:
            return await self._answer(scope, route, body, channel)
        except asyncio.CancelledError:
            if not is_gone:
                raise
            self.counters.aborted += 1
            return None
        finally:
            watcher.cancel()

    async def _answer(
        self, scope: Scope, route: Route, body: bytes, channel: AnswerChannel
    ) -> int | None:
        """Return the status of the answer that was passed back, or None where the server broke it
        off. A server that cannot be reached is waited for, and a request that it drops is sent
        again some times, if its route may be repeated and its answer has not begun."""
        sends = SendAttempts(self.settings.wait_seconds, MAX_SENDS if route.is_repeatable else 1)
        while True:
            upstream = self.servers.active
            upstream.num_open += 1
            try:
                return await self._request(upstream, scope, body, channel)
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                if channel.has_begun:
                    # The answer is not ended, so that the client sees a broken one, as it would
                    # without the proxy.
                    self.counters.failed += 1
                    return None
                problem = sends.note_failure(was_sent=not isinstance(error, UNSENT))
                if problem is not None:
                    self.counters.failed += 1
                    await send_error(channel.send, 502, problem)
                    return 502
                self.counters.retried += 1
            finally:
                upstream.num_open -= 1
            await sends.wait()

    async def _request(
        self, upstream: Upstream, scope: Scope, body: bytes, channel: AnswerChannel
    ) -> int:
        assert self._session is not None, "requests are answered inside `open_connections`"
        query = scope["query_string"].decode("latin-1")
        path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1").partition("?")[0]
        url = URL(upstream.root + path + (f"?{query}" if query else ""), encoded=True)
        passed = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in select_passed_headers(scope["headers"])
        ]
        headers = [
            (name, value) for name, value in passed if name not in ("host", "content-length")
        ]
        async with self._session.request(
            scope["method"], url, data=body or None, headers=headers, allow_redirects=False
        ) as response:
            if response.status not in FINAL_STATUSES:
                raise aiohttp.ClientPayloadError(f"the server answered status {response.status}")
            raw = [
                *select_passed_headers(
                    (name.lower(), value) for name, value in response.raw_headers
                )
            ]
            async for chunk in response.content.iter_any():
                # Headers wait for the first part, because a request whose answer has not begun can
                # be repeated.
                if not channel.has_begun:
                    await channel.begin(response.status, raw)
                await channel.send_chunk(chunk)
            if not channel.has_begun:
                await channel.begin(response.status, raw)
            await channel.end()
            return response.status


UNSENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""Failures to connect, after which a server has seen nothing of a request."""


class SendAttempts:
    """How often a request was sent, and whether it is sent again."""

    def __init__(self, wait_seconds: float, max_sends: int) -> None:
        self.deadline = time.monotonic() + wait_seconds
        self.wait_seconds = wait_seconds
        self.max_sends = max_sends
        self.num_sends = 0
        self.pause = FIRST_PAUSE_SECONDS

    def note_failure(self, was_sent: bool) -> str | None:
        """Count an attempt; return why there is no further one, or None."""
        if was_sent:
            self.num_sends += 1
            # The server may have worked for long before it ended; from now on it is waited for.
            self.deadline = time.monotonic() + self.wait_seconds
        if self.num_sends >= self.max_sends:
            times = "once" if self.num_sends == 1 else f"{self.num_sends} times"
            return (
                f"the server dropped this request {times} without an answer; it is not sent again"
            )
        if time.monotonic() >= self.deadline:
            return f"the server does not answer, for {self.wait_seconds:g} seconds"
        return None

    async def wait(self) -> None:
        """Wait before the next attempt, twice as long as before the last one."""
        await asyncio.sleep(min(self.pause, max(0.0, self.deadline - time.monotonic())))
        self.pause = min(2 * self.pause, LONGEST_PAUSE_SECONDS)


class AnswerTap:
    """Keeps a copy of an answer, up to a number of bytes and to what all requests may hold."""

    def __init__(self, room: int, held: HeldBytes) -> None:
        self.room = room
        self.held = held
        self.parts = list[bytes]()
        self.is_complete = False

    def add(self, chunk: bytes) -> None:
        """Keep a part of the answer, or drop all parts where there is no room."""
        self.room -= len(chunk)
        if self.room >= 0 and self.held.take(len(chunk)):
            self.parts.append(chunk)
        else:
            self.room = -1
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
