"""A drafter that learns elsewhere is pushed into a running server, by the requests of follow."""

from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from spectrain.errors import RunError, UserError
from spectrain.servers.ports import find_free_port
from spectrain_serve.engines.control_key import VARIABLE
from spectrain_serve.follow.http_server import serve_in_thread
from spectrain_serve.follow.publisher import DrafterPublisher
from spectrain_serve.follow.swap import DrafterSwapper

KEY = "a-key-of-the-tests-0123"


@asynccontextmanager
async def no_connections() -> Any:
    yield


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """Serve what takes drafters, except from a folder called refused; yield its address and the
    folders that it got.
    """
    monkeypatch.setenv(VARIABLE, KEY)
    # These drafters are files of no layout.
    monkeypatch.setattr(DrafterSwapper, "export", lambda self, directory, digest: directory)
    loaded = ["first"]

    async def swap(request: Request) -> JSONResponse:
        assert request.headers["authorization"] == f"Bearer {KEY}"
        path = (await request.json())["path"]
        if path.endswith("refused"):
            return JSONResponse({"error": "it does not fit"}, 400)
        loaded.append(path)
        return JSONResponse({"path": path})

    async def describe(request: Request) -> JSONResponse:
        return JSONResponse({"path": loaded[-1]})

    routes = [Route("/drafter", describe), Route("/swap_drafter", swap, methods=["POST"])]
    port = find_free_port()
    with serve_in_thread(Starlette(routes=routes), "127.0.0.1", port, no_connections):
        yield f"http://127.0.0.1:{port}/v1", loaded


def make_drafter(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(folder.name)
    return folder


def test_a_drafter_is_pushed(server: tuple[str, list[str]], tmp_path: Path) -> None:
    url, loaded = server
    publish = DrafterPublisher("spectrain", url)
    publish(make_drafter(tmp_path / "better"))
    assert loaded == ["first", str(tmp_path / "better")]
    with pytest.raises(RunError, match="status 400"):
        publish(make_drafter(tmp_path / "refused"))
    assert len(loaded) == 2


def test_a_server_that_takes_none_is_refused() -> None:
    with pytest.raises(UserError, match=r"use vllm or spectrain|takes no weights"):
        DrafterPublisher("openai", "http://127.0.0.1:1/v1")
    with pytest.raises(UserError, match="takes no other drafter"):
        DrafterPublisher("spectrain", "http://127.0.0.1:1/v1")
