"""The contract of starting an engine, and of giving a running one another drafter. A file per
engine implements it, with what `spectrain.servers` knows of the engine.
"""

from __future__ import annotations

from typing import Any, ClassVar

from spectrain.errors import UserError
from spectrain.servers.commands import EngineCommand, EngineLaunch
from spectrain.trees import Chain
from spectrain.trees.base import TreeBuilder

from ..servers.base import Server


class EngineStarter:
    """Starts the engine of a server by its settings. Without methods of its own, an engine is not
    started and takes no other drafter.
    """

    # Format in which the target has to be exported to be started; None for an engine that reads
    # transformers' files.
    target_format: ClassVar[str | None] = None
    # Whether it starts in seconds, so that it can be started again for each setting of a
    # measurement.
    starts_quickly: ClassVar[bool] = False
    # Whether each request may choose the number of tokens that its rounds draft, as
    # num_assistant_tokens in its body.
    chooses_draft_length: ClassVar[bool] = False

    def __init__(self, server: Server) -> None:
        self.server = server

    def make_builder(self, num_tokens: int) -> TreeBuilder:
        """Return our own tree for what the engine drafts, with so many tokens: a chain, unless
        the engine has trees.
        """
        return Chain(num_tokens)

    def check_installed(self) -> None:
        """Raise a UserError if spectrain cannot start this engine on this machine."""
        raise UserError(
            f"server={self.server.name}: spectrain does not start it; start it yourself and give "
            "server.url, or take server=vllm"
        )

    def read_version(self) -> str | None:
        """Return the version of the engine that is installed; None if it does not tell."""
        return None

    def make_command(self, launch: EngineLaunch) -> EngineCommand:
        """Return the command that starts this engine; raise a UserError for what the engine
        cannot do.
        """
        raise UserError(
            f"server={self.server.name}: spectrain does not start it; start it yourself and give "
            "server.url, or take server=vllm"
        )

    def prepare_start(self, launch: EngineLaunch) -> None:
        """Prepare the folders that a started engine writes into."""

    # Request below the server's root that names the active drafter: an address, and a body or None
    # for GET. It is None if the server does not tell. A server that does not answer it takes no
    # other drafter.
    active_drafter_request: ClassVar[tuple[str, dict[str, Any] | None] | None] = None

    def swap_steps(self, folder: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the posts, as address below the server's root and body, that load the drafter of a
        folder into the running server; [] if it takes none."""
        return []

    def active_drafter_path(self, content: dict[str, Any]) -> str | None:
        """Return the folder of the active drafter from the answer to `active_drafter_request`;
        None for an unknown one.
        """
        return None

    def control_headers(self) -> dict[str, str]:
        """Return the headers of requests that load another drafter or name the active one."""
        return {}

    def allow_swaps(self) -> Server:
        """Return this server with the settings by which engines that it starts take other
        drafters, as far as they can.
        """
        return self.server
