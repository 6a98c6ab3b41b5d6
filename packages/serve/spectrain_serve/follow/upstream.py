"""The server behind the proxy: which one answers now, and how many requests each still answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(eq=False)
class Upstream:
    """A server, without /v1 at the end of its address."""

    root: str
    num_open: int = 0


class UpstreamSwitch:
    """The server that new requests go to. Only the event loop of the proxy changes it."""

    def __init__(self, url: str) -> None:
        self.active = Upstream(url.rstrip("/").removesuffix("/v1"))

    def switch(self, url: str) -> Upstream:
        """Send new requests to another server; return the earlier one, which still answers its
        open requests.
        """
        earlier = self.active
        self.active = Upstream(url.rstrip("/").removesuffix("/v1"))
        return earlier


async def wait_until_drained(upstream: Upstream, seconds: float, poll: float = 0.05) -> bool:
    """Wait until a server has answered its open requests; return whether it has."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while upstream.num_open and loop.time() < deadline:
        await asyncio.sleep(poll)
    return upstream.num_open == 0
