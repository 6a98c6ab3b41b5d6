"""The proxy passes bytes on unchanged, records what it may, and refuses hostile input."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from packages.serve.tests.servers.stand_in import Reply, StandIn
from spectrain.servers.ports import find_free_port
from spectrain_serve.follow import proxy as proxy_module
from spectrain_serve.follow.bodies import ByteBudget
from spectrain_serve.follow.exchange import Exchange
from spectrain_serve.follow.http_server import serve_in_thread
from spectrain_serve.follow.limits import (
    MAX_HEAD_BYTES,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_MODEL_CHARACTERS,
    MAX_PATH_BYTES,
    MAX_SENDS,
    MAX_WAITING_EXCHANGES,
)
from spectrain_serve.follow.proxy import AnswerTap, Proxy, Recorder
from spectrain_serve.follow.requests import Refusal, check_headers, find_route, parse_body
from spectrain_serve.follow.settings import ListenSettings
from spectrain_serve.follow.upstream import UpstreamSwitch

STREAM = (
    "".join(f'data: {{"choices": [{{"index": 0, "text": "part {n} é"}}]}}\n\n' for n in range(50))
    + "data: [DONE]\n\n"
)


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
            httpx.AsyncClient(
                transport=httpx.ASGITransport(proxy), base_url="http://proxy", timeout=20
            ) as client,
        ):
            return await work(client, proxy)

    return asyncio.run(session()), proxy


def test_answers_pass_byte_by_byte_and_are_recorded(server: EchoServer) -> None:
    async def work(client: httpx.AsyncClient, proxy: Proxy) -> Any:
        headers = {"Authorization": "Bearer secret-key", "x-spectrain-kind": "agent"}
        streamed = await client.post(
            "/v1/completions", json={"prompt": "a", "stream": True}, headers=headers
        )
        complete = await client.post("/v1/completions", json={"prompt": "b"}, headers=headers)
        unrecorded = await client.post(
            "/v1/completions", json={"prompt": "c"}, headers={"x-spectrain-follow": "off"}
        )
        return streamed, complete, unrecorded, await client.get("/v1/models")

    (streamed, complete, unrecorded, models), proxy = run(server, work)
    assert streamed.content == STREAM.encode() and streamed.headers["x-own"] == "kept"
    assert complete.json()["choices"][0]["text"] == "b" and unrecorded.status_code == 200
    assert models.json() == server.models[1]
    assert server.keys == ["Bearer secret-key", "Bearer secret-key", None]
    exchanges = proxy.recorder.take_all()
    assert [exchange.response for exchange in exchanges] == [streamed.content, complete.content]
    assert {exchange.kind_header for exchange in exchanges} == {"agent"}
    assert b"secret-key" not in b"".join(
        exchange.request + exchange.response for exchange in exchanges
    )


def test_hostile_requests_are_refused_before_the_server(server: EchoServer) -> None:
    async def work(client: httpx.AsyncClient, proxy: Proxy) -> list[int]:
        bodies = [
            b"{",
            b"[1]",
            b"[" * 100000,
            json.dumps({"model": "../../etc/passwd"}).encode(),
            b'{"model": 3}',
        ]
        statuses = [
            (await client.post("/v1/completions", content=body)).status_code for body in bodies
        ]
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
    assert (
        reply.status_code == 502
        and proxy.counters.failed == 1
        and proxy.servers.active.num_open == 0
    )


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


def test_headers_without_end_close_the_connection_and_long_bodies_do_not(
    server: EchoServer,
) -> None:
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
        with httpx.Client(
            base_url=f"http://127.0.0.1:{address[1]}", timeout=20, trust_env=False
        ) as client:
            for _ in range(3):
                assert (
                    client.post("/v1/completions", json=body).json()["choices"][0]["text"]
                    == body["prompt"]
                )


@pytest.mark.parametrize(
    "path",
    [
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/loras", "/v1/chat/completions/",
        "/V1/chat/completions",
        "/v1/chat%2fcompletions", "/v1/chat%2Fcompletions", "/v1/Completions", "//v1/completions",
        "/v1//completions",
        "/v1/./completions", "/v1/x/../completions", "/v1/completions/../load_lora_adapter",
        "/v1/completions%00",
        "/v1/completions;x=1", "/v1/%63ompletions", "/v1/%6coad_lora_adapter",
        "/v1/models/../load_lora_adapter",
        "/v1/models/%2e%2e/load_lora_adapter", "/v1/models/a/%2e%2e/%2e%2e/load_lora_adapter",
        "/v1/models//x",
        "/v1/models/%252e%252e/x", "/v1/models/a\\b", "/v1/models/", "/sleep", "/wake_up",
        "/reset_prefix_cache",
        "/collective_rpc", "/metrics", "/follow", "/docs", "/openapi.json", "/v1/files",
        "/v1/responses/resp_1",
        "/v1/models/" + "x" * 3000, "/", "*", "", "http://x/v1/completions", "/v1/comple\u0442ions",
    ],
)  # fmt: skip
def test_paths_that_are_not_a_clients_are_unknown(path: str) -> None:
    raw = path.encode()
    for method in ("POST", "GET"):
        with pytest.raises(Refusal) as refusal:
            find_route(method, unquote(path), raw)
        assert refusal.value.status == 404


def test_paths_of_clients() -> None:
    for path in ("/v1/models/name", "/v1/models/org/name.v1:latest", "/v1/models"):
        assert find_route("GET", path, path.encode()).is_repeatable
    assert find_route("GET", "/v1/models/org/name", b"/v1/models/org%2Fname").is_repeatable
    assert not find_route("POST", "/v1/responses", b"/v1/responses").is_repeatable
    for method, path in (
        ("GET", "/v1/completions"),
        ("DELETE", "/v1/models/name"),
        ("POST", "/health"),
        ("TRACE", "/health"),
    ):
        with pytest.raises(Refusal) as refusal:
            find_route(method, path, path.encode())
        assert refusal.value.status == 405


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/responses", "/tokenize", "/v1/chat/completions"]
)
def test_bodies_of_every_path_are_checked(server: EchoServer, path: str) -> None:
    bodies = [
        b"abc", b"[]", b"null", b'"x"', b"", b"\xff{}", b'{"model": "../../x"}', b'{"model": 3}',
        b'{"a": NaN}',
        b'{"model": "x", "model": "../x"}', b'{"a": {"b": 1, "b": 2}}', b"[" * 10000,
        b'{"a": ' + b"1" * 5000 + b"}",
        b'{"a": 1e999}', b'{"a": "\xed\xa0\x80"}', b'{"a": "\\ud800"}', b"\xef\xbb\xbf{}",
        '{"a": "b"}'.encode("utf-16"),
        b'{"a": 1} x', b'{"a": 1',
    ]  # fmt: skip
    headers = [{"Content-Type": "application/json; charset=latin-1"}, {"Content-Encoding": "gzip"}]

    async def work(client: httpx.AsyncClient, proxy: Proxy) -> Any:
        replies = [await client.post(path, content=body) for body in bodies]
        return [
            *replies,
            *[await client.post(path, content=b"{}", headers=other) for other in headers],
        ]

    replies, _ = run(server, work)
    assert [reply.status_code for reply in replies] == [400] * len(replies) and not server.bodies
    assert all("\n" not in reply.json()["error"]["message"] for reply in replies)


def test_lengths_of_paths_headers_and_names_are_bounded(server: EchoServer) -> None:
    """Each at its limit passes, and one more is refused."""
    path = "/v1/models/" + "a" * (MAX_PATH_BYTES - len("/v1/models/"))
    name = "a" * MAX_MODEL_CHARACTERS
    assert find_route("GET", path, path.encode())
    with pytest.raises(Refusal, match="not passed on"):
        find_route("GET", path + "a", path.encode() + b"a")
    assert parse_body(json.dumps({"model": name}).encode())
    with pytest.raises(Refusal, match="not the name of a model"):
        parse_body(json.dumps({"model": name + "a"}).encode())
    check_headers([(b"a", b"")] * MAX_HEADERS)
    check_headers([(b"a", b"b" * (MAX_HEADER_BYTES - 1))])
    for headers in ([(b"a", b"")] * (MAX_HEADERS + 1), [(b"a", b"b" * MAX_HEADER_BYTES)]):
        with pytest.raises(Refusal) as refusal:
            check_headers(headers)
        assert refusal.value.status == 431


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(b"host", b"x"), (b"host", b"x")], 400),
        ([(b"host", b"x"), (b"host", b"y")], 400),
        ([(b"transfer-encoding", b"gzip, chunked")], 501),
        ([(b"transfer-encoding", b"identity")], 501),
    ],
)
def test_headers_that_two_servers_may_read_differently_are_refused(
    headers: list[tuple[bytes, bytes]], status: int
) -> None:
    check_headers([(b"host", b"x"), (b"transfer-encoding", b"Chunked")])
    with pytest.raises(Refusal) as refusal:
        check_headers(headers)
    assert refusal.value.status == status


def test_open_requests_are_bounded(server: EchoServer) -> None:
    async def work(client: httpx.AsyncClient, proxy: Proxy) -> Any:
        proxy.counters.num_open = 1
        refused = await client.post("/v1/completions", json={"prompt": "a"})
        proxy.counters.num_open = 0
        return refused, await client.post("/v1/completions", json={"prompt": "a"})

    (refused, later), _ = run(server, work, max_requests=1)
    assert (
        refused.status_code == 503
        and "1 requests are open" in refused.text
        and later.status_code == 200
    )


def test_text_of_every_script_passes() -> None:
    for content in (
        '{"a": "\\ud83d\\ude00 \\\\ud800"}',
        '{"a": "é 漢 😀"}',
        '{"a": 1e300, "b": -0.0}',
    ):
        assert parse_body(content.encode()) == json.loads(content)


class DroppingServer:
    """Reads a request and closes the connection, before or after the head of an answer."""

    def __init__(self, answer: bytes = b"") -> None:
        self.answer = answer
        self.num_requests = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                received = b""
                while b"\r\n\r\n" not in received or (
                    b"content-length" in received.lower() and not received.endswith(b"}")
                ):
                    received += connection.recv(2**16)
                self.num_requests += 1
                connection.sendall(self.answer)


@pytest.mark.parametrize(
    ("path", "answer", "times"),
    [
        ("/v1/completions", b"", MAX_SENDS),
        ("/v1/completions", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n", MAX_SENDS),
        ("/v1/completions", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf", 1),
        ("/v1/completions", b"HTTP/1.1 500 Error\r\nContent-Length: 2\r\n\r\n{}", 1),
        ("/v1/completions", b"HTTP/1.1 999 Odd\r\nContent-Length: 2\r\n\r\n{}", MAX_SENDS),
        ("/v1/completions", b"\x00 no answer", MAX_SENDS),
        ("/v1/responses", b"", 1),
    ],
)
def test_a_request_that_its_server_drops_is_sent_a_few_times(
    path: str, answer: bytes, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only before any of its answer was passed on, and never where the server stores what it
    answers.
    """
    monkeypatch.setattr(proxy_module, "FIRST_PAUSE_SECONDS", 0.01)
    dropping = DroppingServer(answer)

    async def work(client: httpx.AsyncClient, proxy: Proxy) -> Any:
        try:
            return await client.post(path, json={"prompt": "x"})
        except AssertionError:
            # The transport of the test says so of an answer that is not ended.
            return None

    upstream: Any = type("", (), {"url": f"http://127.0.0.1:{dropping.port}/v1"})
    reply, proxy = run(upstream, work)
    dropping.listener.close()
    assert (
        dropping.num_requests == times
        and proxy.counters.num_open == proxy.servers.active.num_open == 0
    )
    if not answer or times == MAX_SENDS:
        assert (
            reply.status_code == 502
            and f"dropped this request {'once' if times == 1 else f'{times} times'}" in reply.text
        )


def test_pauses_between_attempts_double() -> None:
    sends = proxy_module.SendAttempts(60.0, MAX_SENDS)
    pauses = []

    async def note(seconds: float) -> None:
        pauses.append(round(seconds, 3))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(proxy_module.asyncio, "sleep", note)
        for _ in range(6):
            assert sends.note_failure(was_sent=False) is None
            asyncio.run(sends.wait())
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 3.2] and sends.num_sends == 0


def test_all_open_requests_together_hold_a_bounded_number_of_bytes(server: EchoServer) -> None:
    """Bodies count as they come; a request beyond the limit is refused, and all bytes are given
    back.
    """

    async def work(client: httpx.AsyncClient, proxy: Proxy) -> Any:
        with proxy.budget.open() as held:
            assert held.take(9000)
            refused = await client.post("/v1/completions", json={"prompt": "a" * 2000})
            small = await client.post("/v1/completions", json={"prompt": "a"})
        return refused, small, await client.post("/v1/completions", json={"prompt": "a" * 2000})

    (refused, small, later), proxy = run(server, work, max_total_bytes=10000)
    assert refused.status_code == 503 and "10000 bytes" in refused.text
    assert small.status_code == later.status_code == 200 and proxy.budget.num_held == 0


def test_recorded_answers_count_and_what_waits_is_bounded() -> None:
    budget = ByteBudget(100)
    with budget.open() as held:
        tap = AnswerTap(1000, held)
        for _ in range(3):
            tap.add(b"x" * 40)
        tap.finish()
        assert not tap.is_complete and not tap.parts
    recorder = Recorder(1.0)
    dropped = [recorder.add(Exchange("/v1/completions", b"", b"x" * 2**20)) for _ in range(70)]
    assert sum(dropped) == 6 and len(recorder.exchanges) == 64
    dropped = [
        recorder.add(Exchange("/v1/completions", b"", b"")) for _ in range(MAX_WAITING_EXCHANGES)
    ]
    assert sum(dropped) == 64 and len(recorder.take_all()) == MAX_WAITING_EXCHANGES


def test_the_pages_of_the_proxy_need_the_key(server: EchoServer) -> None:
    async def work(client: httpx.AsyncClient, proxy: Proxy) -> Any:
        proxy.key = "0123456789abcdef"
        proxy.pages = {"/metrics": lambda: ("text/plain", b"numbers")}
        address = "http://127.0.0.1/metrics"
        bearer = {"Authorization": "Bearer 0123456789abcdef"}
        replies = [await client.get(address), await client.get(address, headers=bearer)]
        replies += [
            await client.get(address + "?key=0123456789abcdef"),
            await client.get("/metrics", headers=bearer),
        ]
        return [
            reply.status_code
            for reply in [
                *replies,
                await client.get(address, headers={**bearer, "Origin": "http://x"}),
            ]
        ]

    statuses, _ = run(server, work)
    assert statuses == [401, 200, 200, 403, 403] and not server.bodies
