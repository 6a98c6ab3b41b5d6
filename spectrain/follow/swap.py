"""Swaps: the weights of a drafter go into the running server, or a second server is started with them and the first is drained.

A drafter is read back and compared with the hash of its proof before any server gets it, so that no damaged one is ever served.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from spectrain.config.spec import RunSpec
from spectrain.errors import RunError, UserError
from spectrain.runs.serve import find_served_drafter
from spectrain.servers.base import Server
from spectrain.servers.launch import RunningEngine, start_engine
from spectrain.servers.ports import find_free_port
from spectrain.servers.settings import EngineSettings

from .http_server import HttpThread
from .settings import FollowSettings
from .state import hash_weights
from .upstream import UpstreamSwitch, wait_until_drained

SWAP_SECONDS = 120.0
DRAIN_SECONDS = 600.0


@dataclass
class StartedServer:
    """An engine that follow has started, and what stops it."""

    engine: RunningEngine
    stack: ExitStack


@dataclass
class DrafterSwapper:
    """Brings a drafter into use."""

    spec: RunSpec
    server: Server
    settings: FollowSettings
    servers: UpstreamSwitch
    # The proxy's thread, whose event loop changes the active server.
    thread: HttpThread | None = None
    started: StartedServer | None = None
    drains: list[threading.Thread] = field(default_factory=list)

    @property
    def way(self) -> str:
        """Return how drafters are brought into use: push, start or keep."""
        if self.settings.swap != "auto":
            return self.settings.swap
        if self.takes_weights:
            return "push"
        return "start" if self.settings.start else "keep"

    @property
    def takes_weights(self) -> bool:
        """Return whether the running server takes other weights of its drafter."""
        return bool(self.server.swap_steps(""))

    def check_settings(self) -> None:
        """Raise a UserError for a way of swapping that this server does not have."""
        if self.settings.swap == "push" and not self.takes_weights:
            raise UserError(
                f"follow.swap=push: server={self.server.name} takes no weights while it runs; use follow.swap=start "
                "follow.start=true, or follow.swap=keep"
            )
        if self.settings.swap == "start" and not self.settings.start:
            raise UserError("follow.swap=start: follow did not start the server, so it cannot end it; add follow.start=true")

    def swap(self, directory: Path, digest: str) -> str:
        """Serve the drafter of a directory; return how. A RunError says why it is not served; then the earlier one still is."""
        if hash_weights(directory) != digest:
            raise RunError(f"{directory}: the files are not those that were proven; the swap is left out")
        if self.way == "push":
            self.push(directory)
        elif self.way == "start":
            self.start(directory)
        return self.way

    def push(self, directory: Path) -> None:
        """Send the weights of a drafter to the running server."""
        folder = self.export(directory)
        with httpx.Client(base_url=self.servers.active.root, timeout=SWAP_SECONDS, trust_env=False) as client:
            for address, body in self.server.swap_steps(str(folder)):
                try:
                    reply = client.post(address, json=body)
                except httpx.HTTPError as error:
                    raise RunError(f"{address}: the server does not take the drafter ({error})") from error
                if reply.status_code != 200:
                    raise RunError(f"{address}: status {reply.status_code}, {' '.join(reply.text.split())[:300]}")

    def export(self, directory: Path) -> Path:
        """Return the drafter in the server's layout, written next to the directory if that has another one."""
        drafter = find_served_drafter(replace(self.spec, run=str(directory)), self.server.name)
        folder = drafter.directory if drafter.is_exported else directory.with_name(f"{directory.name}-{self.server.name}")
        if not drafter.is_exported:
            drafter.write(folder, getattr(self.server.settings, "python", None))
        return folder.resolve()

    def is_served(self, directory: Path) -> bool | None:
        """Return whether the server says that it drafts with a directory; None if it does not tell."""
        if self.way != "push" or self.server.active_drafter_address is None:
            return None
        try:
            reply = httpx.get(self.servers.active.root + self.server.active_drafter_address, timeout=5.0, trust_env=False)
            path = self.server.active_drafter_path(reply.json())
        except (httpx.HTTPError, ValueError):
            return None
        return None if path is None else Path(path) in (directory.resolve(), self.exported_path(directory))

    def exported_path(self, directory: Path) -> Path:
        """Return where `export` writes a drafter."""
        return directory.with_name(f"{directory.name}-{self.server.name}").resolve()

    def start(self, directory: Path) -> None:
        """Start a server with a drafter, send new requests to it, and stop the earlier one once it is drained."""
        settings = self.server.settings
        if not isinstance(settings, EngineSettings):
            raise UserError(f"server={self.server.name}: follow cannot start it; use follow.swap=keep")
        earlier = self.started
        port = settings.port if earlier is None else find_free_port()
        server = type(self.server)(replace(settings, port=port))
        drafter = find_served_drafter(replace(self.spec, run=str(directory)), server.name)
        folder = self.export(directory)
        stack = ExitStack()
        engine = stack.enter_context(start_engine(server, drafter.make_launch(server, folder)))
        self.started = StartedServer(engine, stack)
        before = self.in_proxy(lambda: self.servers.switch(engine.url))
        if earlier is not None:
            drain = threading.Thread(target=self.stop_drained, args=(earlier, before), daemon=True)
            drain.start()
            self.drains = [*(thread for thread in self.drains if thread.is_alive()), drain]

    def in_proxy(self, function: Callable[[], Any]) -> Any:
        """Call a function in the proxy's event loop, or here before there is one."""
        return function() if self.thread is None else self.thread.call(function)

    def stop_drained(self, started: StartedServer, upstream: Any) -> None:
        """Wait until a server has answered its open requests, and stop it."""
        if self.thread is not None:
            self.thread.run(wait_until_drained(upstream, DRAIN_SECONDS))
        close_engine(started)

    def close(self) -> None:
        """Stop what follow has started."""
        for thread in self.drains:
            thread.join(5)
        if self.started is not None:
            close_engine(self.started)


def close_engine(started: StartedServer) -> None:
    """Stop a started engine; one that has ended by itself raises nothing here."""
    with suppress(RunError):
        started.stack.close()
