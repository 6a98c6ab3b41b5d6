"""llama.cpp's server: answers prompts of token ids, and tells the rounds of each answer by its
stream.

A part of the stream has one token and the counts of drafted and accepted tokens so far, which rise
at the first token of each round. Rounds near the limit draft no more tokens than fit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from spectrain.data.messages import Conversation

from ..servers.base import (
    Completion,
    CompletionRequest,
    DraftCounters,
    DraftedRounds,
    RequestTimes,
    ServedModel,
    ServerCapabilities,
    TimedStep,
    add_counters,
)
from ..servers.counters import read_settled_counters
from ..servers.errors import ServerError, refuse_malformed
from ..servers.openai import OpenAIServer
from .llamacpp_command import LlamaCppSettings

if TYPE_CHECKING:
    from ..servers.client import HttpClient

# Its reasons for the end of an answer -> OpenAI's.
FINISH_REASONS = {"eos": "stop", "word": "stop", "limit": "length"}


class LlamaCppServer(OpenAIServer):
    """A server of llama.cpp (llama-server)."""

    name = "llamacpp"
    capabilities: ClassVar[ServerCapabilities] = ServerCapabilities(
        counts_drafts=True, has_lookup=True
    )
    settings: LlamaCppSettings

    def __init__(self, config: LlamaCppSettings) -> None:
        super().__init__(config)

    def describe_model(self, model: Mapping[str, Any]) -> ServedModel:
        return replace(
            super().describe_model(model), max_length=(model.get("meta") or {}).get("n_ctx")
        )

    async def request_completion(
        self, client: HttpClient, request: CompletionRequest
    ) -> Completion:
        if isinstance(request.prompt, Conversation):
            return await super().request_completion(client, request)
        parts = []
        arrivals = []
        began = time.perf_counter()
        async for part in client.stream(f"{client.root}/completion", self.request_body(request)):
            parts.append(part)
            if part.get("tokens"):
                arrivals.append((time.perf_counter() - began, len(part["tokens"])))
        with refuse_malformed("the streamed answer"):
            return parse_stream(parts, RequestTimes(time.perf_counter() - began, tuple(arrivals)))

    def request_body(self, request: CompletionRequest) -> dict[str, Any]:
        if isinstance(request.prompt, Conversation):
            return super().request_body(request)
        body: dict[str, Any] = {
            "prompt": [*request.prompt],
            "n_predict": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "min_p": 0.0,
            "return_tokens": True,
            "timings_per_token": True,
            "cache_prompt": False,
        }
        return {
            **body,
            **({} if request.seed is None else {"seed": request.seed}),
            **(self.settings.extra or {}),
        }

    async def read_counters(self) -> DraftCounters | None:
        """Return what all servers have counted; None from servers that were started without
        --metrics.
        """
        try:
            return add_counters(
                [await read_settled_counters(client, self.name) for client in self.clients]
            )
        except ServerError:
            return None


def parse_stream(parts: list[dict[str, Any]], times: RequestTimes) -> Completion:
    """Return the answer that the parts of a stream make up; raise a KeyError or IndexError for a
    stream without its end.
    """
    last = parts[-1]
    if not last["stop"]:
        raise ValueError("its end is missing")
    tokens = [token for part in parts for token in part.get("tokens") or ()]
    steps = [part["timings"] for part in parts if part.get("tokens")]
    timings = last["timings"]
    count = int(last["tokens_predicted"])
    # The engine's clock of later tokens starts at the first one.
    per_token = timings["predicted_ms"] / 1000 / (count - 1) if count > 1 else None
    return Completion(
        {"role": "assistant", "content": "".join(part.get("content", "") for part in parts)},
        FINISH_REASONS.get(str(last.get("stop_type")), str(last.get("stop_type"))),
        count,
        replace(times, engine_per_token=per_token),
        token_ids=tokens,
        rounds=parse_rounds(steps),
        timed_steps=parse_steps(steps),
    )


def parse_rounds(timings: list[dict[str, Any]]) -> DraftedRounds | None:
    """Return the rounds of an answer from the counts beside its tokens; None if nothing was
    drafted.
    """
    rounds = []
    before = (0, 0)
    for counts in timings:
        now = (int(counts.get("draft_n_accepted", 0)), int(counts.get("draft_n", 0)))
        if now[1] > before[1]:
            rounds.append((now[0] - before[0], now[1] - before[1]))
            before = now
    return DraftedRounds(*map(tuple, zip(*rounds))) if rounds else None


def parse_steps(timings: list[dict[str, Any]]) -> tuple[TimedStep, ...]:
    """Return the forwards of an answer: all tokens of a forward carry the milliseconds at its
    end.
    """
    steps = list[TimedStep]()
    before = dict[str, Any]()
    for counts in timings:
        if before and counts.get("predicted_ms", 0.0) > before.get("predicted_ms", 0.0):
            drafted, accepted, milliseconds = (
                counts.get(key, 0) - before.get(key, 0)
                for key in ("draft_n", "draft_n_accepted", "predicted_ms")
            )
            steps.append(TimedStep(int(drafted), int(accepted), milliseconds / 1000))
        before = counts
    return tuple(steps)
