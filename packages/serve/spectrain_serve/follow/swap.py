"""Swaps: the weights of a drafter go into the running server, or a second server is started with
them and the first is drained.

A drafter is read back and compared with the hash of its proof before any server gets it, so that no
damaged one is ever served.
"""

from __future__ import annotations

import shlex
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import httpx

from spectrain.config.spec import RunSpec
from spectrain.errors import RunError, UserError
from spectrain.servers.commands import EngineCommand, EngineLaunch
from spectrain.servers.ports import find_free_port

from ..engines.launch import RunningEngine, start_engine
from ..engines.serve import find_served_drafter
from ..engines.starter import EngineStarter
from ..engines.starters import find_starter
from ..servers.base import Server
from ..servers.errors import MALFORMED
from ..servers.settings import EngineSettings
from .http_server import HttpThread
from .settings import FollowSettings
from .state import hash_weights
from .upstream import Upstream, UpstreamSwitch, wait_until_drained

SWAP_SECONDS = 120.0
DRAIN_SECONDS = 600.0
SwapWay = Literal["push", "start", "keep"]


@dataclass(frozen=True)
class SwapOutcome:
    """How a drafter was brought into use, and why its weights could not be pushed where that was
    tried first.
    """

    way: SwapWay
    push_error: str | None = None


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
    def starter(self) -> EngineStarter:
        """Return what starts the engine of the server and gives it other drafters."""
        return find_starter(self.server)

    @property
    def can_start(self) -> bool:
        """Return whether follow may start a server and send requests to it."""
        return (
            self.settings.start or self.settings.command is not None
        ) and self.settings.requests is None

    @property
    def way(self) -> SwapWay:
        """Return how drafters are brought into use, as far as the running server is known now."""
        if self.settings.swap != "auto":
            return self.settings.swap
        if self.takes_weights:
            return "push"
        return "start" if self.can_start else "keep"

    @property
    def takes_weights(self) -> bool:
        """Return whether the running server takes other weights of its drafter."""
        return bool(self.starter.swap_steps("")) and self.read_active() is not None

    def check_settings(self) -> None:
        """Raise a UserError for a way of swapping that this server does not have."""
        swap, name = self.settings.swap, self.server.name
        if swap == "push" and not self.starter.swap_steps(""):
            raise UserError(
                f"follow.swap=push: server={name} takes no weights while it runs; use "
                "follow.swap=start follow.start=true, or follow.swap=keep"
            )
        if swap == "push" and not self.settings.start and not self.takes_weights:
            raise UserError(
                f"follow.swap=push: the server at {self.servers.active.root} takes no other "
                f"drafter; start it with spectrain serve server={name} "
                "server.takes_drafters=true, or use follow.swap=keep"
            )
        if swap == "start" and self.settings.requests is not None:
            raise UserError(
                "follow.swap=start: without the proxy no requests can go to another server; leave "
                "follow.requests out"
            )
        if swap == "start" and not self.can_start:
            raise UserError(
                "follow.swap=start: say how servers are started, by follow.start=true or "
                "follow.command=COMMAND"
            )
        if (swap == "start" or self.settings.start) and not isinstance(
            self.server.settings, EngineSettings
        ):
            raise UserError(f"server={name}: follow cannot start it; use follow.swap=keep")

    def swap(self, directory: Path, digest: str) -> SwapOutcome:
        """Serve the drafter of a directory; return how. A RunError says why it is not served;
        then the earlier one still is.
        """
        if hash_weights(directory) != digest:
            raise RunError(
                f"{directory}: the files are not those that were proven; the swap is left out"
            )
        way = self.way
        if way == "start":
            self.start(directory, digest)
        if way != "push":
            return SwapOutcome(way)
        try:
            self.push(directory, digest)
        except RunError as error:
            if self.settings.swap != "auto" or not self.can_start:
                raise
            self.start(directory, digest)
            return SwapOutcome("start", str(error))
        return SwapOutcome("push")

    def push(self, directory: Path, digest: str) -> None:
        """Send the weights of a drafter to the running server."""
        folder = self.export(directory, digest)
        with httpx.Client(
            base_url=self.servers.active.root, timeout=SWAP_SECONDS, trust_env=False
        ) as client:
            for address, body in self.starter.swap_steps(str(folder)):
                try:
                    reply = client.post(address, json=body, headers=self.starter.control_headers())
                except httpx.HTTPError as error:
                    raise RunError(
                        f"{address}: the server does not take the drafter ({error})"
                    ) from error
                if reply.status_code != 200:
                    raise RunError(
                        f"{address}: status {reply.status_code}, "
                        f"{' '.join(reply.text.split())[:300]}"
                    )

    def export(self, directory: Path, digest: str) -> Path:
        """Return the drafter in the server's layout, written next to the directory if that has
        another one.
        """
        drafter = find_served_drafter(replace(self.spec, run=str(directory)), self.server.name)
        if drafter.is_exported:
            return drafter.directory.resolve()
        folder = self.exported_path(directory, digest)
        if not folder.exists():
            drafter.write(folder, getattr(self.server.settings, "python", None))
        return folder

    def exported_path(self, directory: Path, digest: str) -> Path:
        """Return where `export` writes a drafter."""
        return directory.with_name(f"{directory.name}-{self.server.name}-{digest[:8]}").resolve()

    def read_active(self) -> Path | None:
        """Return the folder of the drafter that the server says it drafts with; None if it does
        not tell.
        """
        if self.starter.active_drafter_request is None:
            return None
        address, body = self.starter.active_drafter_request
        try:
            reply = httpx.request(
                "GET" if body is None else "POST",
                self.servers.active.root + address,
                json=body,
                headers=self.starter.control_headers(),
                timeout=5.0,
                trust_env=False,
            )
            path = (
                self.starter.active_drafter_path(reply.json()) if reply.status_code == 200 else None
            )
        except (httpx.HTTPError, *MALFORMED):
            return None
        return None if path is None else Path(path)

    def is_served(self, directory: Path, digest: str) -> bool | None:
        """Return whether the server says that it drafts with a directory; None if it does not
        tell.
        """
        path = self.read_active() if self.settings.swap in ("auto", "push") else None
        return (
            None
            if path is None
            else path in (directory.resolve(), self.exported_path(directory, digest))
        )

    def start(self, directory: Path, digest: str, is_first: bool = False) -> None:
        """Start a server with a drafter and send new requests to it. An earlier one is stopped once
        it is drained, if follow has started it. The first server listens at server.port, and later
        ones at free ports."""
        earlier = self.started
        server = (
            self.starter.allow_swaps() if self.settings.swap in ("auto", "push") else self.server
        )
        settings = server.settings
        assert isinstance(settings, EngineSettings), "check_settings refuses other servers"
        server = type(server)(
            replace(settings, port=settings.port if is_first else find_free_port())
        )
        stack = ExitStack()
        engine = stack.enter_context(
            start_engine(server, self.make_launch(server, directory, digest))
        )
        self.started = StartedServer(engine, stack)
        before = self.in_proxy(lambda: self.servers.switch(engine.url))
        if not is_first:
            drain = threading.Thread(target=self.stop_drained, args=(earlier, before), daemon=True)
            drain.start()
            self.drains = [*(thread for thread in self.drains if thread.is_alive()), drain]

    def make_launch(
        self, server: Server, directory: Path, digest: str
    ) -> EngineLaunch | EngineCommand:
        """Return what starts a server with a drafter: the configured command, or that of
        `spectrain serve`.
        """
        folder = self.export(directory, digest)
        if self.settings.command is not None:
            values = {"{drafter}": str(folder), "{port}": str(getattr(server.settings, "port", 0))}
            words = shlex.split(self.settings.command)
            for name, value in values.items():
                words = [word.replace(name, value) for word in words]
            return EngineCommand(words)
        return find_served_drafter(replace(self.spec, run=str(directory)), server.name).make_launch(
            server, folder
        )

    def restart_ended(self, directory: Path, digest: str) -> bool:
        """Start a server again that follow had started and that has ended by itself; return
        whether it had.
        """
        if self.started is None or self.started.engine.process.poll() is None:
            return False
        ended = self.started
        self.started = None
        close_engine(ended)
        self.start(directory, digest)
        return True

    def in_proxy(self, function: Callable[[], Any]) -> Any:
        """Call a function in the proxy's event loop, or here before there is one."""
        return function() if self.thread is None else self.thread.call(function)

    def stop_drained(self, started: StartedServer | None, upstream: Upstream) -> None:
        """Wait until a server has answered its open requests, and stop it if follow has started
        it.
        """
        if self.thread is not None:
            self.thread.run(wait_until_drained(upstream, DRAIN_SECONDS))
        if started is not None:
            close_engine(started)
        else:
            print(
                f"{upstream.root} gets no more requests and can be stopped",
                file=sys.stderr,
                flush=True,
            )

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
