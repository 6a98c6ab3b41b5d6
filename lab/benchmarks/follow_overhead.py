"""What the proxy of `spectrain follow` adds to a request, and what recording costs, at 1, 16 and
200 streams.

    python -m lab.benchmarks.follow_overhead out=lab/results/follow-overhead.json

A server in a process of its own streams 16 parts, one every 20 ms, or answers at once. Requests go
to it directly and through a proxy in another process, in turn. A row holds medians over requests:
milliseconds to the first part, and to the whole answer.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from spectrain.files import write_text
from spectrain.servers.ports import find_free_port
from spectrain_serve.follow.http_server import make_http_server
from spectrain_serve.follow.proxy import Proxy, Recorder
from spectrain_serve.follow.settings import ListenSettings
from spectrain_serve.follow.upstream import UpstreamSwitch

NUM_PARTS = 16
PART_SECONDS = 0.02
NUM_REQUESTS = {1: 60, 16: 160, 200: 600}
BODY = {"prompt": "x" * 1000, "max_tokens": 16}
PART = (
    b'data: {"choices": [{"index": 0, "text": "some words of an answer", "token_ids": [1, 2, '
    b"3]}]}\n\n"
)
MODES = {"direct": "", "proxy": "sample=0", "proxy, recorded": "sample=1"}


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer a request: a stream of paced parts, or one part at once."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-type", b"text/event-stream")],
        }
    )
    if b'"stream"' in body:
        for _ in range(NUM_PARTS):
            await send({"type": "http.response.body", "body": PART, "more_body": True})
            await asyncio.sleep(PART_SECONDS)
    await send({"type": "http.response.body", "body": PART + b"data: [DONE]\n\n"})


def serve(role: str, port: int, upstream: str, sample: float) -> None:
    """Run the server or the proxy, in this process."""
    if role == "server":
        asyncio.run(make_http_server(answer, "127.0.0.1", port).serve())
        return
    recorder = Recorder(sample)
    proxy = Proxy(ListenSettings(), UpstreamSwitch(upstream), recorder)

    async def run() -> None:
        async with proxy.open_connections():
            await make_http_server(proxy, "127.0.0.1", port).serve()

    server = make_http_server(proxy, "127.0.0.1", port)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(run())


@contextmanager
def run_process(*words: str) -> Iterator[None]:
    """Run a role in a process until the block ends."""
    process = subprocess.Popen([sys.executable, "-m", "lab.benchmarks.follow_overhead", *words])
    try:
        yield
    finally:
        process.terminate()
        process.wait()


async def measure_request(
    session: aiohttp.ClientSession, url: str, streams: bool
) -> tuple[float, float]:
    """Return the milliseconds to the first part of an answer, and to its end."""
    began = time.perf_counter()
    body = {**BODY, **({"stream": True} if streams else {})}
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        first = await reply.content.readany()
        at_first = time.perf_counter()
        assert first and reply.status == 200
        async for _ in reply.content.iter_any():
            pass
    return 1000 * (at_first - began), 1000 * (time.perf_counter() - began)


async def measure(
    urls: dict[str, str], concurrency: int, streams: bool
) -> dict[str, list[tuple[float, float]]]:
    """Send batches of concurrent requests to every address in turn; return their times."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in urls}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for _ in range(max(2, NUM_REQUESTS[concurrency] // concurrency)):
            for name, url in urls.items():
                requests = (measure_request(session, url, streams) for _ in range(concurrency))
                times[name] += await asyncio.gather(*requests)
    # The first batch opens connections.
    return {name: rows[concurrency:] for name, rows in times.items()}


async def wait_for(url: str) -> None:
    """Wait until an address answers."""
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                await measure_request(session, url, False)
                return
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)


def run_all() -> list[dict[str, Any]]:
    """Return the rows of the measurement."""
    ports = {name: find_free_port() for name in MODES}
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    rows = []
    with (
        run_process("role=server", f"port={ports['direct']}"),
        run_process(
            "role=proxy", f"port={ports['proxy']}", f"upstream={urls['direct']}", MODES["proxy"]
        ),
        run_process(
            "role=proxy",
            f"port={ports['proxy, recorded']}",
            f"upstream={urls['direct']}",
            MODES["proxy, recorded"],
        ),
    ):
        for url in urls.values():
            asyncio.run(asyncio.wait_for(wait_for(url), 120))
        for streams, concurrency in ((False, 1), (True, 1), (True, 16), (True, 200)):
            for name, times in asyncio.run(measure(urls, concurrency, streams)).items():
                first, complete = (round(median(column), 2) for column in zip(*times))
                rows.append(
                    {
                        "streams": concurrency,
                        "streamed": streams,
                        "way": name,
                        "first_ms": first,
                        "whole_ms": complete,
                        "requests": len(times),
                    }
                )
                print(rows[-1], flush=True)
    return rows


def main(words: list[str]) -> None:
    """Run a role of the measurement, or all of it."""
    settings = dict(word.split("=", 1) for word in words)
    if "role" in settings:
        serve(
            settings["role"],
            int(settings["port"]),
            settings.get("upstream", ""),
            float(settings.get("sample", "0")),
        )
        return
    rows = run_all()
    if "out" in settings:
        from spectrain.provenance import collect_provenance

        content = {"provenance": collect_provenance(), "rows": rows}
        write_text(Path(settings["out"]), json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
