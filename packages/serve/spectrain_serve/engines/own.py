"""This project's engine behind OpenAI's interface (`spectrain_serve.follow.own_engine`): token ids,
rounds of each answer, and other weights of its drafter while it runs."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from spectrain.errors import UserError
from spectrain.servers.commands import EngineCommand, EngineLaunch

from ..servers.base import DraftedRounds, ServerCapabilities
from ..servers.openai import OpenAIServer
from ..servers.settings import EngineSettings
from .control_key import bearer_header, read_control_key
from .starter import EngineStarter

MODULE = "spectrain_serve.follow.own_engine"


class OwnServer(OpenAIServer):
    """A server of this project's engine. It answers one request at a time, so it is for tests
    and demonstrations.
    """

    name = "spectrain"
    capabilities: ClassVar[ServerCapabilities] = ServerCapabilities(counts_drafts=True)
    settings: EngineSettings

    def __init__(self, config: EngineSettings) -> None:
        super().__init__(config)

    def parse_rounds(self, response: dict[str, Any]) -> DraftedRounds | None:
        rounds = (response.get("metrics") or {}).get("rounds")
        return (
            None
            if rounds is None
            else DraftedRounds(tuple(rounds["accepted"]), tuple(rounds["drafted"]))
        )


class OwnStarter(EngineStarter):
    """Starts this project's engine."""

    starts_quickly = True

    def __init__(self, server: OwnServer) -> None:
        super().__init__(server)
        self.settings = server.settings

    active_drafter_request = ("/drafter", None)

    def check_installed(self) -> None:
        """This package requires all that its engine needs."""

    def make_command(self, launch: EngineLaunch) -> EngineCommand:
        if (
            launch.drafter is None
            or launch.drafter.path is None
            or launch.capture_layers is not None
        ):
            raise UserError(
                "server=spectrain: it serves a drafter only; give run=DIR, and leave capture out"
            )
        options = {
            "run": launch.drafter.path,
            "tokens": self.settings.draft_tokens or launch.drafter.num_tokens,
            "host": self.settings.host,
            "port": self.settings.port,
            "name": launch.served_name,
        }
        words = [f"{key}={value}" for key, value in options.items()]
        return EngineCommand([self.settings.python or sys.executable, "-m", MODULE, *words])

    def swap_steps(self, folder: str) -> list[tuple[str, dict[str, Any]]]:
        return [("/swap_drafter", {"path": folder})]

    def active_drafter_path(self, content: dict[str, Any]) -> str | None:
        return content.get("path")

    def control_headers(self) -> dict[str, str]:
        return bearer_header(read_control_key())
