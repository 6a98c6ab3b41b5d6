"""The proxy passes bytes on unchanged, records what it may, and refuses hostile input."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from spectrain.follow.http_server import MAX_HEAD_BYTES, serve_in_thread
from spectrain.follow.proxy import Proxy, Recorder
from spectrain.follow.requests import Refusal, parse_body
from spectrain.follow.settings import ListenSettings
from spectrain.follow.upstream import UpstreamSwitch
from spectrain.servers.ports import find_free_port
from tests.servers.stand_in import Reply, StandIn

STREAM = "".join(f'data: {{"choices": [{{"index": 0, "text": "part {n} é"}}]}}\n\n' for n in range(50)) + "data: [DONE]\n\n"


class EchoServer(StandIn):
    """Answers a stream or an echo of the body, and notes the headers' keys."""

    def reply_to_post(self, path: str, body: dict[str, Any]) -> Reply:
        if body.get("stream"):
            return 200, STREAM, {"Content-Type": "text/event-stream", "X-Own": "kept"}
        return 200, {"choices": [{"index": 0, "text": body["prompt"]}]}, {}


@pytest.fixture
def server() -> Iterator[EchoServer]:
    stand_in = EchoServer()
    yield stand_in
    stand_in.stop()


Work = Callable[[httpx.AsyncClient, Proxy], Any]


def run(server: StandIn, work: Work, **settings: Any) -> tuple[Any, Proxy]:
    """Run requests against a proxy in this process."""
    proxy = Proxy(ListenSettings(**settings), UpstreamSwitch(server.url), Recorder(1.0))

    async def session() -> Any:
        async with (
            proxy.open_connections(),
            httpx.AsyncClient(transport=httpx.ASGITransport(proxy), base_url="http://proxy", timeout=20) as client,
        ):
            return await work(client, proxy)

    return asyncio.run(session()), proxy


def test_answers_pass_byte_by_byte_and_are_recorded(server: EchoServer) -> None:
    async def work(client: httpx.AsyncClient, proxy: Proxy) -> Any:
        headers = {"Authorization": "Bearer secret-key", "x-spectrain-kind": "agent"}
        streamed = await client.post("/v1/completions", json={"prompt": "a", "stream": True}, headers=headers)
        complete = await client.post("/v1/completions", json={"prompt": "b"}, headers=headers)
        unrecorded = await client.post("/v1/completions", json={"prompt": "c"}, headers={"x-spectrain-follow": "off"})
        return streamed, complete, unrecorded, await client.get("/v1/models")

    (streamed, complete, unrecorded, models), proxy = run(server, work)
    assert streamed.content == STREAM.encode() and streamed.headers["x-own"] == "kept"
    assert complete.json()["choices"][0]["text"] == "b" and unrecorded.status_code == 200
    assert models.json() == server.models[1]
    assert server.keys == ["Bearer secret-key", "Bearer secret-key", None]
    exchanges = proxy.recorder.take_all()
    assert [exchange.response for exchange in exchanges] == [streamed.content, complete.content]
    assert {exchange.kind_header for exchange in exchanges} == {"agent"}
    assert b"secret-key" not in b"".join(exchange.request + exchange.response for exchange in exchanges)


def test_hostile_requests_are_refused_before_the_server(server: EchoServer) -> None:
    async def work(client: httpx.AsyncClient, proxy: Proxy) -> list[int]:
        bodies = [b"{", b"[1]", b"[" * 100000, json.dumps({"model": "../../etc/passwd"}).encode(), b'{"model": 3}']
        statuses = [(await client.post("/v1/completions", content=body)).status_code for body in bodies]
        statuses.append((await client.post("/v1/completions", content=b" " * 200000)).status_code)
        for path in (
            "/start_draft_weight_update",
            "/v1/../collective_rpc",
            "/v1/%2e%2e/collective_rpc",
            "/swap_drafter",
            "/v1//x",
        ):
            statuses.append((await client.post(path, json={})).status_code)
        many = [(f"x-{number}", "y") for number in range(101)]
        statuses.append((await client.get("/v1/models", headers=many)).status_code)
        return statuses

    statuses, proxy = run(server, work, max_body_bytes=150000)
    assert statuses == [400] * 5 + [413] + [404] * 5 + [431]
    assert not server.bodies and not proxy.recorder.exchanges and proxy.counters.num_open == 0


def test_a_server_that_is_started_anew_loses_no_request(server: EchoServer) -> None:
    server.stop()

    async def work(client: httpx.AsyncClient, proxy: Proxy) -> Any:
        threading.Timer(0.3, server.start).start()
        return await client.post("/v1/completions", json={"prompt": "late"})

    reply, proxy = run(server, work)
    assert reply.status_code == 200 and proxy.counters.retried >= 1


def test_a_server_that_stays_away_is_reported(server: EchoServer) -> None:
    server.stop()

    async def work(client: httpx.AsyncClient, proxy: Proxy) -> Any:
        return await client.post("/v1/completions", json={"prompt": "x"})

    reply, proxy = run(server, work, wait_seconds=0.05)
    assert reply.status_code == 502 and proxy.counters.failed == 1 and proxy.servers.active.num_open == 0


def test_long_answers_are_passed_on_and_not_recorded(server: EchoServer) -> None:
    async def work(client: httpx.AsyncClient, proxy: Proxy) -> Any:
        return await client.post("/v1/completions", json={"prompt": "a" * 5000})

    reply, proxy = run(server, work, max_record_bytes=3000)
    assert len(reply.content) > 5000 and not proxy.recorder.exchanges


def test_model_names() -> None:
    assert parse_body(b'{"model": "/models/org/name"}')["model"] == "/models/org/name"
    for name in ('"a/../b"', '"a\\\\..\\\\b"', '"a\\u0000b"', f'"{"x" * 600}"'):
        with pytest.raises(Refusal):
            parse_body(f'{{"model": {name}}}'.encode())


def test_another_server_takes_new_requests(server: EchoServer) -> None:
    other = EchoServer()

    async def work(client: httpx.AsyncClient, proxy: Proxy) -> Any:
        await client.post("/v1/completions", json={"prompt": "one"})
        earlier = proxy.servers.switch(other.url)
        await client.post("/v1/completions", json={"prompt": "two"})
        return earlier.num_open

    with stop_at_exit(other):
        open_requests, _ = run(server, work)
    assert open_requests == 0 and [len(server.bodies), len(other.bodies)] == [1, 1]


@contextmanager
def stop_at_exit(stand_in: StandIn) -> Iterator[None]:
    try:
        yield
    finally:
        stand_in.stop()


def test_headers_without_end_close_the_connection_and_long_bodies_do_not(server: EchoServer) -> None:
    """Whether they come at once or in many parts; the parser alone would collect them."""
    proxy = Proxy(ListenSettings(), UpstreamSwitch(server.url), Recorder(0.0))
    with serve_in_thread(proxy, "127.0.0.1", find_free_port(), proxy.open_connections) as thread:
        address = ("127.0.0.1", thread.server.config.port)
        for size in (MAX_HEAD_BYTES + 1000, 1000):
            with socket.create_connection(address, timeout=10) as connection:
                connection.sendall(b"GET /v1/models HTTP/1.1\r\nx-long: ")
                try:
                    for _ in range(0, 40 * MAX_HEAD_BYTES, size):
                        connection.sendall(b"a" * size)
                    answer = connection.recv(100)
                except ConnectionError:
                    answer = b""
                assert not answer or answer.startswith(b"HTTP/1.1 400 ")
        body = {"prompt": "b" * (4 * MAX_HEAD_BYTES)}
        with httpx.Client(base_url=f"http://127.0.0.1:{address[1]}", timeout=20, trust_env=False) as client:
            for _ in range(3):
                assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == body["prompt"]
