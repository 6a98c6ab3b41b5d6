"""`spectrain follow` and `spectrain follow status`."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from spectrain.config.build import GroupSpec, to_containers
from spectrain.config.resolve import LowerLayers
from spectrain.config.spec import RunSpec, read_run
from spectrain.errors import RunError, UserError
from spectrain.output.streams import print_text
from spectrain.output.verbosity import print_json
from spectrain.runs.defaults import load_saved_settings
from spectrain.runs.folder import require_drafter_directory

from ..engines.control_key import VARIABLE, key_path, read_control_key
from ..engines.process_group import GRACE_SECONDS
from ..engines.serve import interrupt_on_signals
from ..servers.openai import OpenAIServer
from .follower import TrafficFollower
from .http_server import allow_open_files, serve_in_thread
from .logs import RequestLogs
from .pages import make_pages
from .proxy import Proxy, Recorder
from .settings import FollowSettings
from .state import FollowFolder
from .swap import DrafterSwapper
from .upstream import UpstreamSwitch


def follow_command(config: Mapping[str, Any], words: Iterable[str]) -> None:
    """Follow the traffic of a server until a signal ends it; `words` are those of the command."""
    spec, settings = resolve_follow_spec(config, words)
    folder = FollowFolder(Path(str(spec.run)))
    server: OpenAIServer = spec.server.build()
    with folder.lock(), interrupt_on_signals():
        first = require_drafter_directory("run", folder.run)
        active = folder.read_active(first)
        servers = UpstreamSwitch(server.clients[0].url)
        swapper = DrafterSwapper(spec, server, settings, servers)
        needs_server = settings.requests is None or settings.swap != "keep"
        if needs_server and not settings.start:
            server.check_ready()
        swapper.check_settings()
        try:
            if settings.start or (settings.swap == "start" and active.path != str(first)):
                swapper.start(Path(active.path), active.digest, is_first=settings.start)
            recorder = Recorder(settings.sample, folder.clock.now)
            traffic = recorder if settings.requests is None else read_logs(settings, folder)
            follower = TrafficFollower(spec, settings, folder, server, traffic, swapper, active)
            follower.load()
            run_proxy(follower, Proxy(settings, servers, recorder))
        finally:
            swapper.close()


def read_logs(settings: FollowSettings, folder: FollowFolder) -> RequestLogs:
    """Return the request logs of a folder; a UserError says that it does not exist."""
    logs = Path(str(settings.requests))
    if not logs.is_dir():
        raise UserError(
            f"follow.requests={settings.requests}: there is no such folder; give the one with the "
            ".jsonl files"
        )
    return RequestLogs(settings, logs, folder.logs, folder.clock.now)


def run_proxy(follower: TrafficFollower, proxy: Proxy) -> None:
    """Run the proxy and the loop until a signal ends them."""
    settings = follower.settings
    host, port = settings.address
    allow_open_files()
    proxy.key = read_control_key()
    proxy.pages = make_pages(
        proxy.counters, follower.describe, follower.watch, follower.folder.ledger
    )
    with serve_in_thread(proxy, host, port, proxy.open_connections) as thread:
        follower.swapper.thread = thread
        loop = threading.Thread(target=follower.run, name="follower", daemon=True)
        loop.start()
        addresses = list_addresses(follower)
        print_json(addresses)
        print_text(describe_traffic(follower))
        print_text(
            f"metrics are at {addresses['metrics']}, and a page is at {addresses['page']}; both "
            f"need the control key, which is in {VARIABLE} or in {key_path()}"
        )
        try:
            while loop.is_alive() and thread.thread.is_alive():
                loop.join(0.5)
            raise RunError("follow: a thread of it has ended")
        finally:
            follower.is_stopping.set()
            loop.join(GRACE_SECONDS + 5)


def list_addresses(follower: TrafficFollower) -> dict[str, str]:
    """Return what is followed, where clients send their requests, and where decisions stand."""
    settings = follower.settings
    root = f"http://{settings.listen}"
    followed = settings.requests or follower.swapper.servers.active.root
    return {
        "follows": str(followed),
        "url": f"{root}/v1",
        "metrics": f"{root}/metrics",
        "page": f"{root}/follow",
        "ledger": str(follower.folder.ledger),
    }


def describe_traffic(follower: TrafficFollower) -> str:
    """Return the line that says what is followed."""
    settings, root = follower.settings, follower.swapper.servers.active.root
    if settings.requests is not None:
        return f"follow reads the request logs of {settings.requests}"
    return f"follow listens at http://{settings.listen}/v1 for {root}"


def resolve_follow_spec(
    config: Mapping[str, Any], words: Iterable[str]
) -> tuple[RunSpec, FollowSettings]:
    """Return the settings of candidates, those of the run with the changes that the command's
    words name, and those of the command.
    """
    requested = to_containers(config)
    follow = requested.pop("follow")
    if requested.get("run") is None:
        raise UserError("run: say whose drafter follows the traffic, as in run=runs/NAME")
    if not requested.get("server"):
        raise UserError(
            "server: name the server, as in server=vllm server.url=http://127.0.0.1:8000/v1"
        )
    folder = Path(requested["run"])
    target = GroupSpec.from_node("target", requested.get("target"))
    saved = load_saved_settings(folder, target, ("trainer", "optimizer", "schedule"))
    # A candidate is a training of its own, and not one of the run's recipe.
    lower = LowerLayers(run={**saved, "recipe_name": None}, origin=folder)
    settings: FollowSettings = GroupSpec.from_node("follow", follow).build()
    spec, _ = read_run(requested, overrides=words, lower=lower)
    return spec, settings
