"""A server in this process: our own chain answers, and counts its rounds as vLLM does."""

from typing import ClassVar

from spectrain.data.chat import tokenize_prompt
from spectrain.data.chat_template import ChatTemplate
from spectrain.data.messages import Conversation
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.models.target import Target
from spectrain.trees import Chain
from spectrain_serve.servers.base import (
    Completion,
    CompletionRequest,
    DraftCounters,
    DraftedRounds,
    RequestTimes,
    ServedModel,
    Server,
    ServerCapabilities,
    add_counters,
)
from spectrain_serve.servers.client import HttpClient
from spectrain_serve.servers.errors import ServerError
from spectrain_serve.servers.settings import ClientSettings

NOTHING = DraftCounters(0, 0, ())


class OwnServer(Server):
    """Answers greedily with a drafter, or without one. `counts` says where its rounds can be
    read: requests or totals.
    """

    name = "own"
    capabilities: ClassVar[ServerCapabilities] = ServerCapabilities(counts_drafts=True)

    def __init__(
        self, target: Target, drafter: Drafter | None, depth: int = 3, counts: str = "requests"
    ) -> None:
        super().__init__(ClientSettings(url="http://127.0.0.1:1/v1"))
        self.target = target
        self.drafter = drafter
        self.depth = depth
        self.counts = counts
        self.template: ChatTemplate = target.template
        self.total = NOTHING
        # Requests with this number of prompt tokens fail.
        self.failing_length: int | None = None

    def check_ready(self) -> ServedModel:
        return ServedModel("served", self.target.max_length)

    async def request_completion(
        self, client: HttpClient, request: CompletionRequest
    ) -> Completion:
        prompt = (
            tokenize_prompt(self.template, request.prompt)
            if isinstance(request.prompt, Conversation)
            else list(request.prompt)
        )
        if len(prompt) == self.failing_length and request.streams:
            raise ServerError("failed", "the prompt is unlucky")
        chain = None if self.drafter is None else Chain(self.depth)
        generation = decode(
            self.target, [prompt], Greedy(), request.max_new_tokens, self.drafter, chain
        )[0]
        rounds = None
        if self.drafter is not None:
            rounds = DraftedRounds(
                tuple(n - 1 for n in generation.round_lengths), tuple(generation.depths)
            )
            self.total = add_counters([self.total, count_rounds(rounds)])
        step = 0.01
        times = RequestTimes(
            step * len(generation.output),
            tuple((step * n, 1) for n in range(1, len(generation.output) + 1)),
        )
        text = self.target.tokenizer.decode(generation.output)
        return Completion(
            {"role": "assistant", "content": text},
            "length",
            len(generation.output),
            times,
            token_ids=generation.output,
            prompt_ids=prompt,
            rounds=rounds if self.counts == "requests" else None,
        )

    async def read_counters(self) -> DraftCounters | None:
        return None if self.drafter is None else self.total


def count_rounds(rounds: DraftedRounds) -> DraftCounters:
    """Count rounds as vLLM does: a step without a draft is none."""
    pairs = [
        (accepted, drafted) for accepted, drafted in zip(rounds.accepted, rounds.drafted) if drafted
    ]
    deepest = max((drafted for _, drafted in pairs), default=0)
    by_position = tuple(
        sum(accepted > position for accepted, _ in pairs) for position in range(deepest)
    )
    return DraftCounters(len(pairs), sum(drafted for _, drafted in pairs), by_position)
