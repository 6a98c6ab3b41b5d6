"""Gives every better drafter to a running server, for what learns elsewhere, as
`spectrain_serve.integrations` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spectrain.config.build import GroupSpec, register_resolvers
from spectrain.config.spec import RunSpec
from spectrain.errors import UserError

from ..servers.openai import OpenAIServer
from .settings import FollowSettings
from .state import hash_weights
from .swap import DrafterSwapper
from .upstream import UpstreamSwitch


class DrafterPublisher:
    """Sends the weights of a drafter to a server that `spectrain serve server.takes_drafters=true`
    has started, by the requests with which `spectrain follow` swaps drafters.
    """

    def __init__(self, server: str, url: str, **settings: Any) -> None:
        """Name the server by its choice, as in vllm, and its address; `settings` are further ones
        of that choice. A UserError says that it takes no drafters.
        """
        register_resolvers()
        group = GroupSpec("server", server).with_settings(url=url, **settings)
        built = group.build()
        if not isinstance(built, OpenAIServer):
            raise UserError(f"server={server}: it takes no drafters; use vllm or spectrain")
        self.swapper = DrafterSwapper(
            RunSpec(server=group), built, FollowSettings(swap="push"), UpstreamSwitch(url)
        )
        self.swapper.check_settings()

    def __call__(self, directory: Path) -> None:
        """Send the drafter of a folder; a RunError says why the server keeps its earlier one."""
        self.swapper.swap(directory, hash_weights(directory) or "")
