"""Bodies of requests, read within limits: of one body, and of all that are open together."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from .limits import MAX_DROPPED_BYTES
from .requests import Refusal, check_encoding, check_headers

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class ByteBudget:
    """The bytes that all open requests together may hold. Only the event loop uses it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_held = 0

    @contextmanager
    def open(self) -> Iterator[HeldBytes]:
        """Yield the bytes of one request, which are given back at the end of the block."""
        held = HeldBytes(self)
        try:
            yield held
        finally:
            self.num_held -= held.count


class HeldBytes:
    """The bytes that one request holds of a budget."""

    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self.count = 0

    def take(self, count: int) -> bool:
        """Take more bytes; return whether there is room for them."""
        if self.budget.num_held + count > self.budget.limit:
            return False
        self.budget.num_held += count
        self.count += count
        return True


class RequestReceiver:
    """Receives the parts of a request, and knows whether there are more."""

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.is_complete = False

    async def __call__(self) -> Message:
        message = await self.receive()
        self.is_complete = message["type"] != "http.request" or not message.get("more_body")
        return message

    async def drop_rest(self) -> None:
        """Read what else comes of the request, within the limits of time and of a number of bytes,
        and forget it.

        A connection that is closed while bytes of it are unread is reset, and then its client may
        lose the answer.
        """
        num_dropped = 0
        while not self.is_complete and num_dropped <= MAX_DROPPED_BYTES:
            num_dropped += len((await self()).get("body", b""))


async def read_body(scope: Scope, receive: Receive, limit: int, held: HeldBytes) -> bytes:
    """Return the body of a request; raise a Refusal for one that is too large, before it is read
    where its length is given.
    """
    declared = dict(scope["headers"]).get(b"content-length")
    if declared is not None and (not declared.isdigit() or int(declared[:20]) > limit):
        raise Refusal(413 if declared.isdigit() else 400, f"the body is larger than {limit} bytes")
    parts = list[bytes]()
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal(400, "the request broke off")
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise Refusal(413, f"the body is larger than {limit} bytes")
        # Bytes count as they come, so that a length which is only promised keeps nobody out.
        if not held.take(len(part)):
            raise Refusal(
                503, f"the open requests hold {held.budget.limit} bytes together; try again later"
            )
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


async def close_other_connection(scope: Scope, send: Send) -> bool:
    """Close a connection that is not HTTP, such as a web socket; return whether it was one."""
    if scope["type"] == "http":
        return False
    await send({"type": "websocket.close"})
    return True


async def send_response(
    send: Send,
    status: int,
    content: bytes,
    content_type: str,
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> None:
    """Send a whole response."""
    sent = [
        (b"content-type", content_type.encode()),
        (b"content-length", str(len(content)).encode()),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": sent})
    await send({"type": "http.response.body", "body": content, "more_body": False})


def format_error(status: int, message: str) -> bytes:
    """Return an error in OpenAI's form."""
    return json.dumps(
        {"error": {"message": message[:500], "type": "spectrain", "code": status}}
    ).encode()


async def send_error(send: Send, status: int, message: str) -> None:
    """Send an error in OpenAI's form."""
    await send_response(send, status, format_error(status, message), "application/json")


async def send_refusal(
    scope: Scope, receiver: RequestReceiver, send: Send, refusal: Refusal
) -> None:
    """Send a refusal. Where the body of the request is not read to its end, the connection ends
    after that.
    """
    content = format_error(refusal.status, str(refusal))
    if receiver.is_complete or scope["method"] in ("GET", "HEAD", "OPTIONS"):
        await send_response(send, refusal.status, content, "application/json")
        return
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": True})
    await receiver.drop_rest()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class BoundedApplication:
    """An ASGI application whose requests reach it once they are complete, within limits of size
    and number.
    """

    def __init__(
        self, application: Application, max_body_bytes: int, max_total_bytes: int, max_requests: int
    ) -> None:
        self.application, self.max_body_bytes, self.max_requests = (
            application,
            max_body_bytes,
            max_requests,
        )
        self.budget = ByteBudget(max_total_bytes)
        self.num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await close_other_connection(scope, send):
            return
        receiver = RequestReceiver(receive)
        try:
            check_headers(scope["headers"])
            check_encoding(scope["headers"])
            with self.budget.open() as held:
                body = await read_body(scope, receiver, self.max_body_bytes, held)
                with self.count_open(scope):
                    await self.application(scope, replay_body(body, receiver), send)
        except Refusal as refusal:
            await send_refusal(scope, receiver, send, refusal)

    @contextmanager
    def count_open(self, scope: Scope) -> Iterator[None]:
        """Count a request while it is answered; those that only ask for the state are never
        refused.
        """
        counts = scope["method"] == "POST" and scope["path"].startswith("/v1/")
        if counts and self.num_open >= self.max_requests:
            raise Refusal(503, f"{self.max_requests} requests are open; try again later")
        self.num_open += counts
        try:
            yield
        finally:
            self.num_open -= counts


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body that was read, and then what else comes."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_next() -> Message:
        return messages.pop() if messages else await receive()

    return receive_next
