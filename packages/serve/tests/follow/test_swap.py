"""A second server, a process of its own, takes over: open streams end whole, new requests go to
it, and the first one ends.
"""

import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from spectrain.config.spec import RunSpec
from spectrain.errors import RunError, UserError
from spectrain.servers.ports import find_free_port
from spectrain_serve.engines import launch
from spectrain_serve.engines.own import OwnServer
from spectrain_serve.follow.http_server import serve_in_thread
from spectrain_serve.follow.proxy import Proxy, Recorder
from spectrain_serve.follow.settings import FollowSettings
from spectrain_serve.follow.state import hash_weights
from spectrain_serve.follow.swap import DrafterSwapper
from spectrain_serve.follow.upstream import UpstreamSwitch
from spectrain_serve.servers.settings import EngineSettings

from .paced_server import NUM_PARTS, Handler

COMMAND = f"{sys.executable} -S {Path(__file__).with_name('paced_server.py')} {{port}} {{drafter}}"


@pytest.fixture
def swapper(monkeypatch: pytest.MonkeyPatch) -> Iterator[DrafterSwapper]:
    monkeypatch.setattr(launch, "POLL_SECONDS", 0.02)
    # These drafters are files of no layout.
    monkeypatch.setattr(DrafterSwapper, "export", lambda self, directory, digest: directory)
    server = OwnServer(EngineSettings(port=find_free_port()))
    settings = FollowSettings(start=True, command=COMMAND, swap="start")
    swapper = DrafterSwapper(RunSpec(), server, settings, UpstreamSwitch("http://127.0.0.1:1/v1"))
    yield swapper
    swapper.close()


@contextmanager
def run_proxy(swapper: DrafterSwapper) -> Iterator[httpx.Client]:
    """Run the proxy before the swapper's servers, and yield a client of it."""
    proxy = Proxy(swapper.settings, swapper.servers, Recorder(0.0))
    with serve_in_thread(proxy, "127.0.0.1", find_free_port(), proxy.open_connections) as thread:
        swapper.thread = thread
        with httpx.Client(
            base_url=f"http://127.0.0.1:{thread.server.config.port}", timeout=20, trust_env=False
        ) as client:
            yield client


def make_drafter(folder: Path) -> tuple[Path, str]:
    folder.mkdir()
    (folder / "config.json").write_text(folder.name)
    return folder, hash_weights(folder) or ""


def send(client: httpx.Client) -> str:
    return client.post("/v1/completions", json={"prompt": "x", "stream": True}).text


def stream_of(folder: Path) -> str:
    return "".join(f"{folder} {number}\n" for number in range(NUM_PARTS))


def start_streams(
    pool: ThreadPoolExecutor, client: httpx.Client, swapper: DrafterSwapper
) -> list[Future[str]]:
    """Open streams, and return once the server answers all of them."""
    streams = [pool.submit(send, client) for _ in range(8)]
    while swapper.servers.active.num_open < 8:
        pass
    return streams


def test_streams_end_completely_while_a_second_server_takes_over(
    swapper: DrafterSwapper, tmp_path: Path
) -> None:
    first, second = (make_drafter(tmp_path / name) for name in ("first", "second"))
    with ThreadPoolExecutor(8) as pool:
        swapper.start(*first, is_first=True)
        earlier = swapper.started
        assert earlier is not None
        with run_proxy(swapper) as client:
            hold = first[0] / "hold"
            hold.touch()
            streams = start_streams(pool, client, swapper)
            assert swapper.swap(*second).way == "start"
            # The first server still answers what it had begun.
            assert not any(stream.done() for stream in streams)
            assert earlier.engine.process.poll() is None
            hold.unlink()
            assert send(client) == stream_of(second[0])
            assert [stream.result() for stream in streams] == [stream_of(first[0])] * 8
            earlier.engine.process.wait(10)


def test_a_server_that_does_not_start_changes_nothing_and_an_ended_server_is_started_again(
    swapper: DrafterSwapper, tmp_path: Path
) -> None:
    first, second = (make_drafter(tmp_path / name) for name in ("first", "second"))
    swapper.start(*first, is_first=True)
    started = swapper.started
    with run_proxy(swapper) as client:
        swapper.settings.command = f"{sys.executable} -c 'raise SystemExit(3)' {{port}} {{drafter}}"
        with pytest.raises(RunError, match="exit status 3"):
            swapper.swap(*second)
        assert swapper.started is started and send(client) == stream_of(first[0])
        swapper.settings.command = COMMAND
        assert started is not None and not swapper.restart_ended(*first)
        started.engine.process.kill()
        started.engine.process.wait()
        assert swapper.restart_ended(*first) and send(client) == stream_of(first[0])


def test_a_server_that_follow_did_not_start_is_left_running(
    swapper: DrafterSwapper, tmp_path: Path, capsys: Any
) -> None:
    from http.server import ThreadingHTTPServer
    from threading import Thread

    own = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=own.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    swapper.settings.start = False
    swapper.servers.switch(f"http://127.0.0.1:{own.server_port}/v1")
    second = make_drafter(tmp_path / "second")
    with run_proxy(swapper) as client:
        assert client.get("/v1/models").status_code == 200
        swapper.check_settings()
        swapper.swap(*second)
        assert send(client) == stream_of(second[0])
        for drain in swapper.drains:
            drain.join(10)
    assert (
        httpx.get(f"http://127.0.0.1:{own.server_port}/v1/models", trust_env=False).status_code
        == 200
    )
    assert (
        f"http://127.0.0.1:{own.server_port} gets no more requests and can be stopped"
        in capsys.readouterr().err
    )
    own.shutdown()
    own.server_close()


def test_a_command_names_drafter_and_port() -> None:
    with pytest.raises(UserError, match="follow.command=serve {drafter}"):
        FollowSettings(command="serve {drafter}")
