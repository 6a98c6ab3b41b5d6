"""Requests that do not go on are refused with 408, whatever part they stop in, and keep no
others out.
"""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

import pytest

from spectrain.servers.ports import find_free_port
from spectrain_serve.follow import bodies, http_server
from spectrain_serve.follow.bodies import Application, BoundedApplication, send_error
from spectrain_serve.follow.http_server import serve_in_thread

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
COMPLETE = HEAD + b"Content-Length: 2\r\n\r\n{}"


async def answer(scope: Any, receive: Any, send: Any) -> None:
    names = [name.decode() for name, _ in scope["headers"]]
    await send_error(send, 200, " ".join(names))


@asynccontextmanager
async def no_connections() -> Any:
    yield


@contextmanager
def serve(
    application: Application, max_requests: int = 2, **limits: float
) -> Iterator[tuple[str, int]]:
    """Serve an application with limits of bytes, and with other limits by their names in
    `http_server`.
    """
    with pytest.MonkeyPatch.context() as patched:
        for name, value in limits.items():
            patched.setattr(http_server, name, value)
        port = find_free_port()
        bounded = BoundedApplication(application, 1000, 1500, max_requests)
        with serve_in_thread(bounded, "127.0.0.1", port, no_connections):
            yield "127.0.0.1", port


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    """A server with short limits."""
    limits = {
        "HEAD_SECONDS": 0.2,
        "PAUSE_SECONDS": 0.2,
        "BODY_SECONDS": 0.5,
        "LOOK_SECONDS": 0.02,
        "MAX_INCOMPLETE": 8,
    }
    with serve(answer, **limits) as address:
        yield address


def receive_all(connection: socket.socket, drip: bytes = b"") -> bytes:
    """Return what the server sends until it closes the connection, while bytes are sent one
    after the other.
    """
    received = b""
    connection.settimeout(0.02 if drip else 20)
    while True:
        try:
            part = connection.recv(1000)
        except TimeoutError:
            connection.sendall(drip)
            continue
        except ConnectionError:
            return received
        if not part:
            return received
        received += part


@pytest.mark.parametrize(
    ("first", "drip", "message"),
    [
        (b"", b"", "the headers did not end"),
        (b"", b"\r\n", "the headers did not end"),
        (b"POST /v1/comp", b"", "the headers did not end"),
        (HEAD, b"", "the headers did not end"),
        (HEAD + b"x-a: ", b"a", "the headers did not end"),
        (HEAD + b"Content-Length: 900\r\n\r\n{", b"", "the body did not go on"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", b"", "the body did not go on"),
        (HEAD + b"Content-Length: 900\r\n\r\n{", b" ", "the body did not end"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", "the body did not end"),
        (
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n",
            b"x: y\r\n",
            "the body did not end",
        ),
    ],
)
def test_a_request_that_does_not_go_on_is_refused(
    address: tuple[str, int], first: bytes, drip: bytes, message: str
) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(first)
        received = receive_all(connection, drip)
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ") and b"connection: close" in head
    assert json.loads(body)["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [("1.1", 0, 400), ("1.1", 1, 200), ("1.1", 2, 400), ("1.0", 0, 200), ("1.0", 2, 400)],
)
@pytest.mark.parametrize("request_line", ["GET /v1/models", "POST /v1/completions"])
def test_a_request_names_one_host(
    address: tuple[str, int], request_line: str, version: str, hosts: int, status: int
) -> None:
    """HTTP/1.1 requires it (RFC 9112, section 3.2); the next request is answered as ever."""
    fields = "Host: x\r\n" * hosts + "Content-Length: 2\r\nConnection: keep-alive\r\n"
    with socket.create_connection(address) as connection:
        connection.sendall(f"{request_line} HTTP/{version}\r\n{fields}\r\n{{}}".encode())
        assert connection.recv(1000).startswith(f"HTTP/1.1 {status} ".encode())
    with socket.create_connection(address) as connection:
        connection.sendall(COMPLETE)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_a_request_without_a_version_is_refused(address: tuple[str, int]) -> None:
    """HTTP/0.9 had neither headers nor a status."""
    with socket.create_connection(address) as connection:
        connection.sendall(b"GET /v1/models\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_half_of_a_second_request_is_refused_too(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(COMPLETE.replace(b"POST", b"GET"))
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"POST /v1")
        assert b"HTTP/1.1 408 " in receive_all(connection)


def test_half_requests_keep_nobody_out(address: tuple[str, int]) -> None:
    """Ten times as many as may wait: the one that has waited longest is closed, and a complete
    request is answered.
    """
    with ExitStack() as stack:
        halves = [stack.enter_context(socket.create_connection(address)) for _ in range(80)]
        for half in halves:
            half.sendall(HEAD + b"Content-Length: 900\r\n\r\n{")
        with socket.create_connection(address) as honest:
            honest.sendall(COMPLETE)
            assert honest.recv(1000).startswith(b"HTTP/1.1 200 ")
        assert b" 408 " in receive_all(halves[0])


def test_fields_after_a_body_are_no_headers(address: tuple[str, int]) -> None:
    """They come after the headers were checked, and a proxy must not pass them on."""
    with socket.create_connection(address) as connection:
        connection.sendall(
            HEAD
            + (
                b"Connection: close\r\nTransfer-Encoding: "
                b"chunked\r\n\r\n2\r\n{}\r\n0\r\nx-smuggled: y\r\n\r\n"
            )
        )
        received = receive_all(connection)
    assert (
        received.startswith(b"HTTP/1.1 200 ")
        and b"transfer-encoding" in received
        and b"x-smuggled" not in received
    )


def test_endless_trailers_and_bodies_beyond_the_limits_end(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n")
        try:
            for _ in range(40):
                connection.sendall(b"x: " + b"y" * 2**15 + b"\r\n")
            answer = connection.recv(1000)
        except ConnectionError:
            answer = b""
        assert not answer or b" 400 " in answer


@pytest.mark.parametrize("header", [b"", b"Connection: close\r\n"])
def test_a_client_that_first_sends_all_gets_the_refusal_of_a_large_body(
    address: tuple[str, int], header: bytes
) -> None:
    """A connection that is closed before all is read would be reset, and the answer lost."""
    with socket.create_connection(address) as connection:
        connection.sendall(HEAD + header + b"Content-Length: 8000000\r\n\r\n" + b"x" * 8_000_000)
        received = receive_all(connection)
    assert received.startswith(b"HTTP/1.1 413 ") and received.endswith(b"}")


def test_a_refused_body_is_read_up_to_a_limit(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_DROPPED_BYTES", 10_000)
    with socket.create_connection(address) as connection, pytest.raises(ConnectionError):
        connection.sendall(HEAD + b"Content-Length: 900000000\r\n\r\n")
        for _ in range(900):
            connection.sendall(b"x" * 1_000_000)


def test_the_number_of_connections_is_bounded() -> None:
    """Also of those that send nothing; a place is free again once one of them has gone."""
    with serve(answer, MAX_CONNECTIONS=4) as address, ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(address)) for _ in range(4)]
        with socket.create_connection(address) as refused:
            received = receive_all(refused)
        assert received.startswith(b"HTTP/1.1 503 ") and b"4 connections are open" in received
        idle[0].close()
        time.sleep(0.05)
        with socket.create_connection(address) as honest:
            honest.sendall(COMPLETE)
            assert honest.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_a_connection_without_a_request_is_closed_after_an_answer() -> None:
    with (
        serve(answer, IDLE_SECONDS=0.1) as address,
        socket.create_connection(address) as connection,
    ):
        connection.sendall(COMPLETE)
        assert receive_all(connection).startswith(b"HTTP/1.1 200 ")


def test_an_answer_that_nobody_reads_ends() -> None:
    ended = threading.Event()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        part = {"type": "http.response.body", "body": b"x" * 2**18, "more_body": True}
        watcher = asyncio.ensure_future(receive())
        while not watcher.done():
            await send(part)
            await asyncio.sleep(0)
        ended.set()

    with (
        serve(stream, UNREAD_SECONDS=0.1) as address,
        socket.create_connection(address) as connection,
    ):
        connection.sendall(COMPLETE)
        assert ended.wait(10)


def test_complete_requests_that_are_open_are_bounded() -> None:
    release = threading.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.to_thread(release.wait, 10)
        await send_error(send, 200, "done")

    with serve(wait) as address, ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(address)) for _ in range(3)]
        for connection in connections:
            connection.sendall(COMPLETE)
            time.sleep(0.02)
        assert connections[2].recv(1000).startswith(b"HTTP/1.1 503 ")
        release.set()
        assert all(
            connection.recv(1000).startswith(b"HTTP/1.1 200 ") for connection in connections[:2]
        )
