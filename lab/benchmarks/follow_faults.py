"""Faults that `spectrain follow` must survive: no request is lost or altered, and no damaged
drafter is served.

    python -m lab.benchmarks.follow_faults out=lab/results/follow-faults.json

A server in a process of its own streams an answer that its prompt determines, so that every answer
through the proxy can be compared with the one without it. The loop runs with its own processes and
files, and without a model.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from spectrain.files import write_text
from spectrain.provenance import collect_provenance
from spectrain.servers.ports import find_free_port
from spectrain_serve.follow.http_server import make_http_server

NUM_PARTS = 12
PART_SECONDS = 0.02
Check = Callable[["FaultRig"], str | None]
"""Returns what went wrong, or None."""


def answer_parts(prompt: str) -> list[bytes]:
    """Return the parts of the answer to a prompt."""
    parts = [
        hashlib.sha256(f"{prompt} {number}".encode()).hexdigest() for number in range(NUM_PARTS)
    ]
    events = [
        f"data: {json.dumps({'choices': [{'index': 0, 'text': part}]})}\n\n".encode()
        for part in parts
    ]
    return [*events, b"data: [DONE]\n\n"]


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer a request with a paced stream, or with the same bytes at once."""
    if scope["type"] != "http":
        return
    content = b""
    while True:
        message = await receive()
        content += message.get("body", b"")
        if not message.get("more_body"):
            break
    body = json.loads(content or b"{}")
    parts = answer_parts(str(body.get("prompt")))
    streams = bool(body.get("stream"))
    start = {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", b"text/event-stream")],
    }
    if not streams and not body.get("quick"):
        # A whole answer begins once it is complete, as engines send it.
        await asyncio.sleep(NUM_PARTS * PART_SECONDS)
    await send(start)
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
        await asyncio.sleep(PART_SECONDS if streams else 0)
    await send({"type": "http.response.body", "body": b""})


class FaultRig:
    """A server and a proxy, each in a process of its own."""

    def __init__(self) -> None:
        self.port = find_free_port()
        self.proxy_port = find_free_port()
        self.url = f"http://127.0.0.1:{self.proxy_port}"
        self.server = self.start("server", self.port)
        self.proxy = self.start("proxy", self.proxy_port)
        asyncio.run(self.send([{"prompt": "ready"}]))

    def start(self, role: str, port: int) -> subprocess.Popen[bytes]:
        """Start a role."""
        words = [f"role={role}", f"port={port}", f"upstream=http://127.0.0.1:{self.port}"]
        return subprocess.Popen(
            [sys.executable, "-m", "lab.benchmarks.follow_faults", *words],
            stderr=subprocess.DEVNULL,
        )

    def restart_server(self, signal_number: signal.Signals) -> None:
        """End the server by a signal after a moment, and start it again."""
        time.sleep(0.1)
        self.server.send_signal(signal_number)
        self.server.wait(60)
        self.server = self.start("server", self.port)

    def close(self) -> None:
        """Stop both."""
        for process in (self.proxy, self.server):
            process.terminate()
        for process in (self.proxy, self.server):
            process.wait(60)

    async def send(self, bodies: list[dict[str, Any]], slow: int = 0, aborting: int = 0) -> int:
        """Send requests at once, of which some read slowly and some break off; return how many
        answers are wrong.
        """
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=120)
        ) as session:

            async def ask(number: int, body: dict[str, Any]) -> bool:
                for _ in range(100):
                    try:
                        async with session.post(f"{self.url}/v1/completions", json=body) as reply:
                            if number < aborting:
                                await reply.content.readany()
                                return True
                            content = b""
                            async for chunk in reply.content.iter_chunked(
                                64 if number < aborting + slow else 2**16
                            ):
                                content += chunk
                                if number < aborting + slow:
                                    await asyncio.sleep(0.01)
                            return content == b"".join(answer_parts(body["prompt"]))
                    except aiohttp.ClientConnectorError:
                        # The proxy has not started yet.
                        await asyncio.sleep(0.1)
                    except aiohttp.ClientError:
                        return False
                return False

            return (
                await asyncio.gather(*(ask(number, body) for number, body in enumerate(bodies)))
            ).count(False)

    def read_memory(self) -> int:
        """Return the resident memory of the proxy in bytes."""
        pages = int(Path(f"/proc/{self.proxy.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    def send_raw(self, content: bytes) -> bytes:
        """Send bytes to the proxy, and return the first bytes of the answer."""
        with socket.create_connection(("127.0.0.1", self.proxy_port), timeout=20) as connection:
            connection.sendall(content)
            try:
                return connection.recv(200)
            except ConnectionError:
                return b""


def make_bodies(name: str, count: int, streams: bool = True) -> list[dict[str, Any]]:
    """Return requests with different prompts."""
    return [{"prompt": f"{name} {number}", "stream": streams} for number in range(count)]


def check_streams(rig: FaultRig) -> str | None:
    """Check 200 streams, of which 30 read slowly and 30 break off."""
    wrong = asyncio.run(
        rig.send(make_bodies(f"streams {time.monotonic()}", 200), slow=30, aborting=30)
    )
    return f"{wrong} answers are wrong" if wrong else None


def check_restart(rig: FaultRig, signal_number: signal.Signals, streams: bool) -> str | None:
    """Check 40 requests while the server is ended and started again."""

    async def run() -> int:
        restart = asyncio.get_running_loop().run_in_executor(
            None, rig.restart_server, signal_number
        )
        wrong = await rig.send(make_bodies(f"restart {time.monotonic()}", 40, streams))
        await restart
        return wrong + await rig.send(make_bodies(f"after {time.monotonic()}", 10, streams))

    wrong = asyncio.run(run())
    return f"{wrong} answers are wrong" if wrong else None


def check_killed_trainer(rig: FaultRig) -> str | None:
    """A process that trains a candidate is killed: the candidate is given up with the reason,
    and the loop goes on.
    """
    from spectrain_serve.follow.candidate import CandidateJob
    from spectrain_serve.follow.ledger import read_ledger

    with tempfile.TemporaryDirectory() as folder:
        follower = make_follower(Path(folder))
        job = CandidateJob(Path(folder) / "0001", follower.settings)
        job.folder.mkdir()
        (job.folder / "train.log").write_text("")
        job.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        follower.job = job
        follower.tick()
        assert follower.job is job
        os.kill(job.process.pid, signal.SIGKILL)
        job.process.wait()
        follower.tick()
        entries = [
            entry for entry in read_ledger(follower.folder.ledger) if entry["event"] == "failed"
        ]
        is_right = follower.job is None and len(entries) == 1 and "SIGKILL" in entries[0]["reason"]
        return None if is_right else f"the ledger holds {entries}"


def make_follower(folder: Path) -> Any:
    """Return a loop without a server."""
    from spectrain.config.spec import RunSpec
    from spectrain_serve.engines.own import OwnServer
    from spectrain_serve.follow.follower import TrafficFollower
    from spectrain_serve.follow.proxy import Recorder
    from spectrain_serve.follow.settings import FollowSettings
    from spectrain_serve.follow.state import ActiveDrafter, FollowFolder
    from spectrain_serve.follow.swap import DrafterSwapper
    from spectrain_serve.follow.upstream import UpstreamSwitch
    from spectrain_serve.servers.settings import EngineSettings

    files = FollowFolder(folder)
    settings = FollowSettings()
    server = OwnServer(EngineSettings())
    files.root.mkdir(exist_ok=True)
    swapper = DrafterSwapper(RunSpec(), server, settings, UpstreamSwitch("http://127.0.0.1:1"))
    active = ActiveDrafter(str(folder / "first"), "", 0.0)
    return TrafficFollower(RunSpec(), settings, files, server, Recorder(1.0), swapper, active)


def check_corrupt_candidate(rig: FaultRig) -> str | None:
    """The files of a proven candidate are cut before the swap: no server gets them, and the
    earlier drafter stays active.
    """
    from spectrain.errors import RunError
    from spectrain_serve.follow.state import hash_weights

    with tempfile.TemporaryDirectory() as name:
        follower = make_follower(Path(name))
        drafter = Path(name) / "second"
        drafter.mkdir()
        (drafter / "config.json").write_text("{}")
        (drafter / "model.safetensors").write_bytes(b"weights" * 1000)
        digest = hash_weights(drafter)
        (drafter / "model.safetensors").write_bytes(b"weights" * 500)
        try:
            follower.swapper.swap(drafter, digest)
        except RunError as error:
            return None if "not those that were proven" in str(error) else str(error)
        return "the damaged drafter was served"


def check_full_disk(rig: FaultRig) -> str | None:
    """No file may grow: the loop goes on, what was saved stays, and the decisions are written
    once there is room.
    """
    from spectrain_serve.follow.ledger import read_ledger

    with tempfile.TemporaryDirectory() as name:
        follower = make_follower(Path(name))
        follower.ledger.record("before")
        follower.save()
        saved = follower.folder.status.read_text()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        try:
            follower.ledger.record("while it is full")
            follower.attempt(follower.save)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        is_intact = follower.folder.status.read_text() == saved
        waited = [entry["event"] for entry in read_ledger(follower.folder.ledger)] == ["before"]
        follower.tick()
        follower.ledger.flush()
        events = [entry["event"] for entry in read_ledger(follower.folder.ledger)]
        return (
            None
            if is_intact and waited and "while it is full" in events
            else f"{is_intact}, {waited}, {events}"
        )


def check_two_processes(rig: FaultRig) -> str | None:
    """Check that a second process that follows the same run is refused."""
    from spectrain_serve.follow.state import FollowFolder

    with tempfile.TemporaryDirectory() as name, FollowFolder(Path(name)).lock():
        code = (
            "from spectrain_serve.follow.state import *\n"
            f"with FollowFolder(Path({name!r})).lock(): pass"
        )
        second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        return (
            None
            if "another process follows this run" in second.stderr
            else "the second process was not refused"
        )


def check_refusal(rig: FaultRig, content: bytes, statuses: tuple[int, ...]) -> str | None:
    """A hostile request is refused with a status, and the next request is answered."""
    status = rig.send_raw(content).split(b" ")[1:2]
    if not status or int(status[0]) not in statuses:
        return f"status {status}"
    return "the next answer is wrong" if asyncio.run(rig.send(make_bodies("next", 1))) else None


def check_memory(rig: FaultRig) -> str | None:
    """Check that 10,000 requests of as many kinds and keys leave the memory of the proxy
    bounded.
    """
    before = rig.read_memory()
    body = b'{"prompt": "x", "quick": true}'

    async def run() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=50)) as session:

            async def send_keyed(number: int) -> None:
                headers = {
                    "x-spectrain-kind": f"kind-{number}",
                    "authorization": f"Bearer {number}",
                }
                async with session.post(
                    f"{rig.url}/v1/completions", data=body, headers=headers
                ) as reply:
                    await reply.read()

            for start in range(0, 10000, 200):
                await asyncio.gather(*(send_keyed(number) for number in range(start, start + 200)))

    asyncio.run(run())
    grown = rig.read_memory() - before
    return f"{grown / 2**20:.0f} MiB more" if grown > 64 * 2**20 else None


def make_request(head: str, body: bytes = b"") -> bytes:
    """Return the bytes of a request."""
    return f"{head}\r\nHost: proxy\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


POST = "POST /v1/completions HTTP/1.1"
OVERSIZED = f"{POST}\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n".encode()
TRAVERSAL = make_request(POST, b'{"model": "../../etc/passwd"}')
CHECKS: list[tuple[str, Check]] = [
    *[("200 streams, 30 slow and 30 aborting clients", check_streams)] * 3,
    *[
        (
            "server restarted (SIGTERM) during streams",
            lambda rig: check_restart(rig, signal.SIGTERM, True),
        )
    ]
    * 3,
    *[
        (
            "server killed (SIGKILL) during whole answers",
            lambda rig: check_restart(rig, signal.SIGKILL, False),
        )
    ]
    * 2,
    *[("trainer killed", check_killed_trainer)] * 2,
    *[("candidate corrupt", check_corrupt_candidate)] * 2,
    *[("disk full", check_full_disk)] * 2,
    ("two processes on one run", check_two_processes),
    ("oversized body", lambda rig: check_refusal(rig, OVERSIZED, (413,))),
    ("malformed JSON", lambda rig: check_refusal(rig, make_request(POST, b"{"), (400,))),
    (
        "header injection",
        lambda rig: check_refusal(rig, make_request(f"{POST}\r\nX-A: b\rSet: c"), (400,)),
    ),
    ("path traversal in a model's name", lambda rig: check_refusal(rig, TRAVERSAL, (400,))),
    ("10,000 distinct keys", check_memory),
]


def serve(role: str, port: int, upstream: str) -> None:
    """Run a role in this process."""
    if role == "server":
        asyncio.run(make_http_server(answer, "127.0.0.1", port).serve())
        return
    from spectrain_serve.follow.proxy import Proxy, Recorder
    from spectrain_serve.follow.settings import ListenSettings
    from spectrain_serve.follow.upstream import UpstreamSwitch

    proxy = Proxy(ListenSettings(), UpstreamSwitch(upstream), Recorder(1.0))

    async def run() -> None:
        async with proxy.open_connections():
            await make_http_server(proxy, "127.0.0.1", port).serve()

    asyncio.run(run())


def main(words: list[str]) -> None:
    """Run a role, or all checks."""
    settings = dict(word.split("=", 1) for word in words)
    if "role" in settings:
        serve(settings["role"], int(settings["port"]), settings["upstream"])
        return
    rig = FaultRig()
    rows = list[dict[str, Any]]()
    try:
        for name, check in CHECKS:
            began = time.perf_counter()
            problem = check(rig)
            rows.append({"fault": name, "passed": problem is None, "problem": problem})
            result = "passed" if problem is None else "FAILED"
            print(
                f"{result}  {name}  {problem or ''} {time.perf_counter() - began:.1f} s", flush=True
            )
    finally:
        rig.close()
    print(f"{sum(row['passed'] for row in rows)} of {len(rows)} passed")
    if "out" in settings:
        write_text(
            Path(settings["out"]),
            json.dumps({"provenance": collect_provenance(), "rows": rows}, indent=1) + "\n",
        )
    sys.exit(not all(row["passed"] for row in rows))


if __name__ == "__main__":
    main(sys.argv[1:])
