"""llama.cpp's server: the rounds in the stream of an answer, by a stand-in."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from packages.serve.tests.servers.stand_in import Reply, StandIn
from spectrain.data.messages import Conversation
from spectrain.servers.commands import LOOKUP, DrafterLaunch
from spectrain_serve.engines.llamacpp_command import (
    LlamaCppSettings,
    drafting_options,
)
from spectrain_serve.engines.llamacpp_server import LlamaCppServer, parse_rounds, parse_steps
from spectrain_serve.servers.base import Completion, CompletionRequest, DraftCounters, DraftedRounds
from spectrain_serve.servers.errors import ServerError

ROUNDS = DraftedRounds((2, 0, 1), (3, 3, 1))
TOKENS = [11, 12, 13, 14, 15, 16, 2]
METRICS = """\
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 38
llamacpp:spec_decode_num_draft_tokens_total 114
llamacpp:spec_decode_num_accepted_tokens_total 22
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 17
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 5
vllm:spec_decode_num_drafts_total{engine="0"} 7
"""


def stream_parts() -> Iterator[dict[str, Any]]:
    """The parts of an answer of one token, then rounds of 3, 1 and 2 tokens."""
    sizes = [0, 3, 1, 2]
    accepted = 0
    drafted = 0
    round_ends = [1, 4, 5, 7]
    for number, token in enumerate(TOKENS, 1):
        index = next(index for index, end in enumerate(round_ends) if number <= end)
        if index and number == round_ends[index] - sizes[index] + 1:
            accepted = accepted + ROUNDS.accepted[index - 1]
            drafted = drafted + ROUNDS.drafted[index - 1]
        counts = {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
        yield {"content": f"<{token}>", "tokens": [token], "stop": False, "timings": counts}
    yield {
        "content": "",
        "tokens": [],
        "stop": True,
        "stop_type": "eos",
        "tokens_predicted": 7,
        "timings": {"predicted_ms": 60.0, "draft_n": 7, "draft_n_accepted": 3},
    }


class LlamaStandIn(StandIn):
    """A server that answers every prompt with the same stream."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [*stream_parts()]
        self.models = (200, {"data": [{"id": "little", "meta": {"n_ctx": 512}}]}, {})

    def reply_to_get(self, path: str) -> Reply:
        return (200, METRICS, {}) if path == "/metrics" else super().reply_to_get(path)

    def reply_to_post(self, path: str, body: dict[str, Any]) -> Reply:
        if path == "/v1/chat/completions":
            return (
                200,
                {
                    "choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}],
                    "usage": {},
                },
                {},
            )
        assert path == "/completion"
        text = "".join(f"data: {json.dumps(part)}\n\n" for part in self.parts)
        return 200, text, {"Content-Type": "text/event-stream"}


@pytest.fixture
def stand_in() -> Iterator[LlamaStandIn]:
    server = LlamaStandIn()
    yield server
    server.stop()


def complete(
    stand_in: StandIn, request: CompletionRequest
) -> tuple[Completion, DraftCounters | None]:
    """Return an answer of a server, and its counters."""

    async def run() -> tuple[Completion, DraftCounters | None]:
        async with LlamaCppServer(
            LlamaCppSettings(url=stand_in.url, model="little", retries=0)
        ) as server:
            return await server.complete(request), await server.read_counters()

    return asyncio.run(run())


def test_an_answer_has_tokens_and_rounds(stand_in: LlamaStandIn) -> None:
    """The stream of an answer tells its rounds, one by one; the server's counters are its own
    alone.
    """
    completion, counters = complete(stand_in, CompletionRequest([5, 6], 7, seed=3))
    assert completion.token_ids == TOKENS and completion.rounds == ROUNDS
    assert (completion.finish_reason, completion.num_tokens, completion.message["content"][:4]) == (
        "stop",
        7,
        "<11>",
    )
    assert [count for _, count in completion.times.arrivals] == [1] * 7
    assert completion.times.engine_per_token == pytest.approx(0.01)
    assert counters == DraftCounters(38, 114, (17, 5))
    body = stand_in.bodies[-1]
    assert (
        body["prompt"],
        body["n_predict"],
        body["temperature"],
        body["seed"],
        body["stream"],
    ) == ([5, 6], 7, 0.0, 3, True)


def test_messages_go_to_the_chat_interface(stand_in: LlamaStandIn) -> None:
    completion, _ = complete(
        stand_in, CompletionRequest(Conversation([{"role": "user", "content": "Hi"}]), 7)
    )
    assert completion.message["content"] == "hello" and completion.token_ids is None


def test_a_stream_without_its_end_is_an_error(stand_in: LlamaStandIn) -> None:
    stand_in.parts = stand_in.parts[:-1]
    with pytest.raises(ServerError, match="its end is missing"):
        complete(stand_in, CompletionRequest([5, 6], 7))


def test_a_prompt_beyond_the_context_is_too_long(stand_in: LlamaStandIn) -> None:
    """llama.cpp's own error is recognized."""
    error = {
        "code": 400,
        "message": "request (300 tokens) exceeds the available context size (256 tokens)",
    }
    stand_in.misbehave = lambda body, number: (400, {"error": error}, {})
    with pytest.raises(ServerError) as caught:
        complete(stand_in, CompletionRequest([5, 6], 7))
    assert caught.value.kind == "too_long"


def test_a_server_tells_its_context(stand_in: LlamaStandIn) -> None:
    served = LlamaCppServer(LlamaCppSettings(url=stand_in.url)).check_ready()
    assert (served.name, served.max_length) == ("little", 512)


def test_tokens_of_a_forward_have_the_same_time() -> None:
    """A rise of the milliseconds is a forward, with the drafts that were counted at it; a
    forward without drafts has none.
    """
    assert parse_steps([{}, {"draft_n": 3}]) == ()
    counts = [
        (0.001, 0, 0),
        (20.001, 3, 2),
        (20.001, 3, 2),
        (20.001, 3, 2),
        (30.001, 3, 2),
        (55.001, 6, 2),
    ]
    names = ("predicted_ms", "draft_n", "draft_n_accepted")
    steps = parse_steps([dict(zip(names, values)) for values in counts])
    assert [(step.drafted, step.accepted) for step in steps] == [(3, 2), (0, 0), (3, 0)]
    assert [step.seconds for step in steps] == pytest.approx([0.02, 0.01, 0.025])


def test_the_lookup_drafts_so_many_tokens_or_none() -> None:
    options = drafting_options(DrafterLaunch(LOOKUP, None, 3))
    assert options["--spec-type"] == "ngram-mod" and "-md" not in options
    assert options["--spec-ngram-mod-n-min"] == options["--spec-ngram-mod-n-max"] == 3


def test_nothing_drafted_is_no_round() -> None:
    assert parse_rounds([{}, {"draft_n": 0}]) is None
