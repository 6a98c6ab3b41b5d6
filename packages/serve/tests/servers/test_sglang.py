"""SGLang's interface as its source documents it, replayed by a stand-in: answers, states,
counts and streams.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from spectrain.data.messages import Conversation
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain_serve.servers.base import Completion, CompletionRequest, DraftCounters
from spectrain_serve.servers.errors import ServerError
from spectrain_serve.servers.settings import EngineSettings
from spectrain_serve.servers.sglang import SglangServer, parse_counters, parse_states

from .stand_in import ModelStandIn, Reply

LAYERS = (2, 4, 7)
PROMPT = [5, 9, 300, 41, 77, 1200, 8]


class SglangStandIn(ModelStandIn):
    """A stand-in for SGLang: token prompts by /generate, whose states are nested lists of
    numbers.
    """

    # Tokens of the prompt that are prefilled at once.
    chunk = 4
    cached = 0
    convention = "eagle3"
    is_incremental = False
    # Entry k: rounds that accepted k drafts.
    histogram: tuple[int, ...] = ()

    def reply_to_get(self, path: str) -> Reply:
        if path == "/server_info":
            numbers = None if self.layers is None else [layer - 1 for layer in self.layers]
            facts = {
                "return_aux_hidden_state_layer_ids": numbers,
                "aux_hidden_state_capture": self.convention,
            }
            return 200, facts | {"internal_states": [{}]}, {}
        return super().reply_to_get(path)

    def reply_to_post(self, path: str, body: dict[str, Any]) -> Reply:
        if path == "/v1/chat/completions":
            return self.reply_to_chat(body)
        if path != "/generate":
            return 404, "nothing here", {}
        with self.lock, torch.no_grad():
            response = self.answer(body)
        if not body["stream"]:
            return 200, response, {}
        return 200, "".join(self.answer_parts(response)), {"Content-Type": "text/event-stream"}

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["input_ids"]
        sampling = body["sampling_params"]
        answer = self.generate(
            prompt,
            {"max_tokens": sampling["max_new_tokens"], "temperature": sampling["temperature"]},
        )
        stopped = answer[-1] in self.target.stop_ids
        reason = (
            {"type": "stop", "matched": answer[-1]}
            if stopped
            else {"type": "length", "length": len(answer)}
        )
        facts: dict[str, Any] = {
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(answer),
            "cached_tokens": self.cached,
        }
        if self.histogram:
            rounds = sum(self.histogram)
            facts |= {"spec_verify_ct": rounds, "spec_num_proposed_drafts": 3 * rounds}
            facts["spec_correct_drafts_histogram"] = [*self.histogram]
        if body["return_hidden_states"] and self.layers is not None:
            facts["hidden_states"] = self.nested_states(prompt, answer)
        text: Any = self.target.tokenizer.decode(answer, skip_special_tokens=True)
        return {"text": text, "output_ids": answer, "prompt_token_ids": prompt, "meta_info": facts}

    def nested_states(self, prompt: list[int], answer: list[int]) -> list[Any]:
        assert self.layers is not None
        states = (
            self.target.features(torch.tensor([prompt + answer[:-1]]), self.layers)
            .hidden[0]
            .flatten(1)
        )
        chunks = [states[first : first + self.chunk] for first in range(0, len(prompt), self.chunk)]
        chunks[-1] = chunks[-1][: len(prompt) - self.chunk * (len(chunks) - 1)]
        return [*(chunk.tolist() for chunk in chunks), *states[len(prompt) :].tolist()]

    def answer_parts(self, response: dict[str, Any]) -> Iterator[str]:
        ids = response["output_ids"]
        facts = response["meta_info"]
        for count in range(1, len(ids) + 1):
            part = {
                "text": "x" if self.is_incremental else response["text"],
                "output_ids": ids[count - 1 : count] if self.is_incremental else ids[:count],
                "meta_info": {**facts, "completion_tokens": count},
            }
            yield f"data: {json.dumps(part)}\n\n"
        yield "data: [DONE]\n\n"

    def reply_to_chat(self, body: dict[str, Any]) -> Reply:
        prompt = self.render_messages(body)
        with self.lock, torch.no_grad():
            answer = self.answer(
                {
                    "input_ids": prompt,
                    "sampling_params": {"max_new_tokens": body["max_tokens"], "temperature": 0.0},
                    "return_hidden_states": False,
                }
            )
        usage = {"completion_tokens": len(answer["output_ids"])}
        more = dict[str, Any]()
        if body["return_spec_tokens_details"] and self.histogram:
            more["spec_tokens_details"] = {
                key: value for key, value in answer["meta_info"].items() if key.startswith("spec_")
            }
        if body.get("stream"):
            if "return_token_ids" in body:
                return 400, {"message": "return_token_ids is not supported with streaming"}, {}
            more |= (
                {"output_ids": [answer["output_ids"]]}
                if body["return_output_ids_in_sglext"]
                else {}
            )
            delta = {"delta": {"content": answer["text"]}, "finish_reason": "length"}
            parts = [
                {"choices": [delta]},
                {"choices": [], "sglext": more},
                {"choices": [], "usage": usage},
            ]
            text = "".join(f"data: {json.dumps(part)}\n\n" for part in parts)
            return 200, text + "data: [DONE]\n\n", {"Content-Type": "text/event-stream"}
        choice: dict[str, Any] = {
            "message": {"role": "assistant", "content": answer["text"]},
            "finish_reason": "length",
        }
        choice |= (
            {"response_token_ids": answer["output_ids"], "prompt_token_ids": prompt}
            if body["return_token_ids"]
            else {}
        )
        return 200, {"choices": [choice], "usage": usage, "sglext": more}, {}


@pytest.fixture
def stand_in(tiny: Target) -> Iterator[SglangStandIn]:
    server = SglangStandIn(tiny, LAYERS)
    yield server
    server.stop()


def complete(
    stand_in: SglangStandIn, *requests: CompletionRequest
) -> tuple[list[Completion], DraftCounters | None]:
    """Return the answers to requests, and the counters."""

    async def run() -> tuple[list[Completion], DraftCounters | None]:
        async with SglangServer(EngineSettings(url=stand_in.url, retries=0)) as server:
            return [
                await server.complete(request) for request in requests
            ], await server.read_counters()

    return asyncio.run(run())


def test_token_prompts_are_answered(stand_in: SglangStandIn, tiny: Target) -> None:
    stand_in.histogram = (2, 0, 3, 1)
    request = CompletionRequest(PROMPT, 6, temperature=0.0, top_p=0.9, top_k=5, seed=3)
    (answer, again), counters = complete(stand_in, request, request)
    assert answer.prompt_ids == PROMPT and answer.token_ids == again.token_ids == stand_in.generate(
        PROMPT, {"max_tokens": 6, "temperature": 0.0}
    )
    assert (answer.num_tokens, answer.finish_reason, answer.states) == (
        len(answer.token_ids or ()),
        "length",
        None,
    )
    body = stand_in.bodies[0]
    assert body["sampling_params"] == {
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 5,
        "max_new_tokens": 6,
        "sampling_seed": 3,
    }
    # Of 6 rounds an answer, 4 accept a token, 4 a second and 1 a third.
    assert counters == DraftCounters(12, 36, (8, 8, 2))


def test_counts_of_an_answer() -> None:
    assert parse_counters({"completion_tokens": 4}) is None
    facts = {
        "spec_verify_ct": 6,
        "spec_num_proposed_drafts": 18,
        "spec_correct_drafts_histogram": [2, 0, 3, 1],
    }
    assert parse_counters(facts) == DraftCounters(6, 18, (4, 4, 1))
    assert parse_counters({"spec_verify_ct": 2, "spec_num_proposed_drafts": 6}) == DraftCounters(
        2, 6, ()
    )


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_states_are_the_targets(stand_in: SglangStandIn, tiny: Target, num_tokens: int) -> None:
    """Chunks of the prompt and rows of generated tokens are put together; the layers have our
    numbers.
    """
    (answer,), _ = complete(stand_in, CompletionRequest(PROMPT, num_tokens, captures_states=True))
    tokens = PROMPT + (answer.token_ids or [])[:-1]
    assert (
        answer.state_layers == LAYERS
        and answer.state_tokens == tokens
        and answer.states is not None
    )
    exact = tiny.features(torch.tensor([tokens]), LAYERS).hidden[0]
    assert torch.equal(answer.states, exact.float()) and len(tokens) == len(PROMPT) + num_tokens - 1


def test_states_that_are_missing_or_malformed_are_refused(stand_in: SglangStandIn) -> None:
    request = CompletionRequest(PROMPT, 2, captures_states=True)
    stand_in.cached = 4
    with pytest.raises(
        ServerError,
        match="states of 4 cached tokens are missing; start the server with --disable-radix-cache",
    ):
        complete(stand_in, request)
    stand_in.cached = 0
    stand_in.layers = (3, 4)
    with pytest.raises(UserError, match="start the server with --speculative-algorithm DFLASH"):
        complete(stand_in, request)
    stand_in.convention = "dflash"
    assert complete(stand_in, request)[0][0].state_layers == (3, 4)
    stand_in.layers = None
    with pytest.raises(UserError, match="does not say which layers it captures"):
        complete(stand_in, request)
    with pytest.raises(UserError, match="states of token prompts only"):
        complete(
            stand_in,
            CompletionRequest(
                Conversation([{"role": "user", "content": "Hi"}]), 2, captures_states=True
            ),
        )
    with pytest.raises(RuntimeError):
        parse_states([[[1.0, 2.0], [3.0, 4.0]], [5.0, 6.0]], 4)


@pytest.mark.parametrize("is_incremental", [False, True])
def test_streams_carry_all_tokens_or_the_new_ones(
    stand_in: SglangStandIn, is_incremental: bool
) -> None:
    stand_in.is_incremental = is_incremental
    request = CompletionRequest(PROMPT, 5, streams=True)
    (answer,), _ = complete(stand_in, request)
    (complete_answer,), _ = complete(stand_in, CompletionRequest(PROMPT, 5))
    assert (
        answer.token_ids == complete_answer.token_ids
        and answer.num_tokens == complete_answer.num_tokens
    )
    assert [count for _, count in answer.times.arrivals] == [1] * complete_answer.num_tokens


def test_messages_are_answered_with_ids_and_counts(stand_in: SglangStandIn) -> None:
    """Streams have both in a part of their own."""
    stand_in.histogram = (1, 2)
    conversation = Conversation([{"role": "user", "content": "Where does the river end?"}])
    complete_answer = CompletionRequest(conversation, 4)
    streamed = CompletionRequest(conversation, 4, streams=True, cache_key="salt")
    answers, counters = complete(stand_in, complete_answer, streamed)
    assert answers[0].token_ids == answers[1].token_ids and answers[0].prompt_ids
    assert (
        len(answers[0].token_ids or ()) == answers[1].num_tokens
        and stand_in.bodies[1]["cache_salt"] == "salt"
    )
    assert answers[0].message["content"] == answers[1].message["content"]
    assert counters == DraftCounters(6, 18, (4,))


def test_errors_of_the_server(stand_in: SglangStandIn) -> None:
    reason = "The input (7 tokens) is longer than the model's context length (4 tokens)."
    stand_in.misbehave = lambda body, number: (400, {"error": {"message": reason}}, {})
    with pytest.raises(ServerError, match="longer than") as refused:
        complete(stand_in, CompletionRequest(PROMPT, 2))
    assert refused.value.kind == "too_long"
    stand_in.misbehave = lambda body, number: (200, {"text": "no ids"}, {})
    with pytest.raises(ServerError, match="malformed"):
        complete(stand_in, CompletionRequest(PROMPT, 2))
