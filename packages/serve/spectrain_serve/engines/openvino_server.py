"""OpenVINO GenAI: answers with token ids and the rounds of each answer."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from ..servers.base import (
    CompletionRequest,
    DraftCounters,
    DraftedRounds,
    ServerCapabilities,
    TimedStep,
    add_counters,
)
from ..servers.openai import OpenAIServer
from .openvino_command import OpenVinoSettings


class OpenVinoServer(OpenAIServer):
    """OpenVINO GenAI behind spectrain's own script, which serves many requests together."""

    name = "openvino"
    capabilities: ClassVar[ServerCapabilities] = ServerCapabilities(
        counts_drafts=True, has_lookup=True
    )
    settings: OpenVinoSettings

    def __init__(self, config: OpenVinoSettings) -> None:
        super().__init__(config)

    def request_body(self, request: CompletionRequest) -> dict[str, Any]:
        return super().request_body(request) | {"return_token_ids": True}

    def parse_rounds(self, response: dict[str, Any]) -> DraftedRounds | None:
        rounds = (response.get("metrics") or {}).get("rounds")
        return (
            None
            if rounds is None
            else DraftedRounds(tuple(rounds["accepted"]), tuple(rounds["drafted"]))
        )

    def parse_steps(self, response: dict[str, Any]) -> tuple[TimedStep, ...]:
        seconds = (response.get("metrics") or {}).get("step_seconds") or ()
        rounds = self.parse_rounds(response)
        if rounds is None:
            return tuple(TimedStep(0, 0, duration) for duration in seconds)
        return tuple(map(TimedStep, rounds.drafted, rounds.accepted, seconds))

    async def read_counters(self) -> DraftCounters | None:
        """Return what all servers have counted; None without a drafter."""
        parts = [json.loads(await client.get(f"{client.root}/counters")) for client in self.clients]
        return add_counters(
            None
            if part is None
            else DraftCounters(
                part["num_rounds"], part["num_drafted"], tuple(part["accepted_by_position"])
            )
            for part in parts
        )
