"""Shadow requests: answered greedy requests, repeated before and after a swap, because drafters
never change outputs.
"""

from __future__ import annotations

from typing import Any

import httpx

from ..servers.errors import MALFORMED
from .traffic import RecordedConversation
from .upstream import UpstreamSwitch

SHADOW_SECONDS = 60.0
SHADOW_TOKENS = 32


def select_shadows(conversations: list[RecordedConversation], count: int) -> list[dict[str, Any]]:
    """Return the bodies of the latest greedy requests, each with a short limit."""
    greedy = [entry for entry in conversations if entry.request.get("temperature") == 0]
    return (
        [{**entry.request, "max_tokens": SHADOW_TOKENS} for entry in greedy[-count:]]
        if count
        else []
    )


class ShadowRequests:
    """Sends requests to the active server, past the proxy, so that they are not recorded."""

    def __init__(self, servers: UpstreamSwitch, bodies: list[dict[str, Any]]) -> None:
        self.servers, self.bodies = servers, bodies

    def send(self) -> list[str | None]:
        """Return the answers; None for a request that failed."""
        with httpx.Client(
            base_url=self.servers.active.root, timeout=SHADOW_SECONDS, trust_env=False
        ) as client:
            return [self._answer(client, body) for body in self.bodies]

    def _answer(self, client: httpx.Client, body: dict[str, Any]) -> str | None:
        is_chat = "messages" in body
        try:
            reply = client.post("/v1/chat/completions" if is_chat else "/v1/completions", json=body)
            choice = reply.json()["choices"][0]
            return str(choice["message"]["content"] if is_chat else choice["text"])
        except (httpx.HTTPError, *MALFORMED):
            return None

    @staticmethod
    def count_changed(before: list[str | None], after: list[str | None]) -> int:
        """Return how many answers differ; a request that failed before does not count."""
        return sum(old is not None and old != new for old, new in zip(before, after))
