"""SGLang: answers, hidden states and draft counts of a running server. Shapes: T tokens, L captured
layers, D target width.

Written for SGLang 0.5.23 from its source, and tested against a stand-in only, because SGLang does
not run without a GPU. Token prompts go to its own interface, /generate. Its layer k is what comes
out of layer k, so it is our layer k + 1: the embedding cannot be captured, and most of its models,
Llama and Qwen3 among them, cannot return the last layer's state either.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from spectrain.data.messages import Conversation
from spectrain.errors import UserError

from .base import (
    Completion,
    CompletionRequest,
    DraftCounters,
    RequestTimes,
    ServerCapabilities,
    add_counters,
)
from .errors import MALFORMED, ServerError, error_text, refuse_malformed
from .openai import OpenAIServer
from .settings import EngineSettings

if TYPE_CHECKING:
    from .client import HttpClient


class SglangServer(OpenAIServer):
    """An SGLang server."""

    name = "sglang"
    capabilities: ClassVar[ServerCapabilities] = ServerCapabilities(
        captures_states=True, counts_drafts=True
    )
    settings: EngineSettings

    def __init__(self, config: EngineSettings) -> None:
        super().__init__(config)
        # What the answers so far have counted: SGLang gives counts by answer and only an average of
        # all.
        self.counters: DraftCounters | None = None
        # The captured layers of each server, by its address.
        self.layers: dict[str, tuple[int, ...]] = {}

    async def request_completion(
        self, client: HttpClient, request: CompletionRequest
    ) -> Completion:
        if isinstance(request.prompt, Conversation):
            if request.captures_states:
                raise UserError(
                    "server=sglang: it returns the states of token prompts only, not those of "
                    "messages"
                )
            return await super().request_completion(client, request)
        response, times = await self._generate(client, request)
        with refuse_malformed("the server's answer"):
            completion = self.parse_answer(response, times)
        return (
            await self._add_states(client, completion, response)
            if request.captures_states
            else completion
        )

    async def _generate(
        self, client: HttpClient, request: CompletionRequest
    ) -> tuple[dict[str, Any], RequestTimes]:
        """Return the response to a token prompt, the last part of a stream, and when it came."""
        body = self.generation_body(request)
        address = f"{client.root}/generate"
        began = time.perf_counter()
        if not request.streams:
            response = await client.post(address, body, check_answer)
            return response, RequestTimes(time.perf_counter() - began)
        parts = []
        arrivals = []
        count = 0
        with refuse_malformed("the streamed answer"):
            async for part in client.stream(address, body):
                parts.append(check_answer(part))
                total = int(part["meta_info"]["completion_tokens"])
                arrivals.append((time.perf_counter() - began, total - count))
                count = total
            return join_answers(parts), RequestTimes(time.perf_counter() - began, tuple(arrivals))

    def generation_body(self, request: CompletionRequest) -> dict[str, Any]:
        """Return the body of a request to /generate, where entries of server.extra are sampling
        parameters.
        """
        assert not isinstance(request.prompt, Conversation)
        sampling: dict[str, Any] = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_new_tokens": request.max_new_tokens,
        }
        if request.seed is not None:
            sampling["sampling_seed"] = request.seed
        if request.top_k:
            sampling["top_k"] = request.top_k
        return {
            "input_ids": [*request.prompt],
            "sampling_params": {**sampling, **(self.settings.extra or {})},
            "stream": request.streams,
            "return_prompt_token_ids": True,
            "return_hidden_states": request.captures_states,
            "cache_salt": request.cache_key,
        }

    def request_body(self, request: CompletionRequest) -> dict[str, Any]:
        """Return the body of a request for messages."""
        details: dict[str, Any] = {
            "return_spec_tokens_details": True,
            "cache_salt": request.cache_key,
        }
        # A stream has the ids of the answer in its last part, and refuses the other way to request
        # them.
        details["return_output_ids_in_sglext" if request.streams else "return_token_ids"] = True
        return super().request_body(request) | details

    def parse_response(
        self, response: dict[str, Any], is_chat: bool, times: RequestTimes
    ) -> Completion:
        choice = response["choices"][0]
        more = response.get("sglext") or {}
        self._count_drafts(more.get("spec_tokens_details") or {})
        ids = choice.get("response_token_ids") or next(iter(more.get("output_ids") or ()), None)
        return replace(super().parse_response(response, is_chat, times), token_ids=ids)

    def parse_answer(self, response: dict[str, Any], times: RequestTimes) -> Completion:
        """Return the answer in a response of /generate."""
        facts = response["meta_info"]
        self._count_drafts(facts)
        return Completion(
            {"role": "assistant", "content": response.get("text") or ""},
            str((facts.get("finish_reason") or {}).get("type")),
            int(facts["completion_tokens"]),
            times,
            token_ids=response["output_ids"],
            prompt_ids=response.get("prompt_token_ids"),
        )

    def _count_drafts(self, facts: dict[str, Any]) -> None:
        self.counters = add_counters([self.counters, parse_counters(facts)])

    async def read_counters(self) -> DraftCounters | None:
        """Return what the answers to this client have counted, the only counts that SGLang
        gives; None without a drafter.
        """
        return self.counters

    async def _add_states(
        self, client: HttpClient, completion: Completion, response: dict[str, Any]
    ) -> Completion:
        """Add the states in a response, which are those of the prompt and of all generated
        tokens but the last.
        """
        if cached := response["meta_info"].get("cached_tokens"):
            raise ServerError(
                "failed",
                f"the states of {cached} cached tokens are missing; start the server with "
                "--disable-radix-cache",
            )
        if client.url not in self.layers:
            self.layers[client.url] = parse_layers(await client.get(f"{client.root}/server_info"))
        layers = self.layers[client.url]
        try:
            states = parse_states(response["meta_info"]["hidden_states"], len(layers))
        except (*MALFORMED, RuntimeError) as error:
            raise ServerError(
                "failed",
                f"the server returned no states [T, {len(layers)}, D] ({error_text(error)})",
            ) from error
        tokens = [*(completion.prompt_ids or ()), *(completion.token_ids or ())][:-1]
        return replace(completion, states=states, state_tokens=tokens, state_layers=layers)


def check_answer(answer: Any) -> dict[str, Any]:
    """Return a response of /generate, or raise a ValueError, KeyError or TypeError for one that
    is malformed.
    """
    if "error" in answer:
        raise ValueError(str(answer["error"]))
    if not isinstance(answer["output_ids"], list):
        raise ValueError("there are no output_ids")
    return {**answer, "meta_info": dict(answer["meta_info"])}


def join_answers(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the whole answer of a stream, whose parts hold all tokens so far, or with
    --incremental-streaming-output the new ones."""
    last = parts[-1]
    if len(last["output_ids"]) == last["meta_info"]["completion_tokens"]:
        return last
    ids = [token for part in parts for token in part["output_ids"]]
    return {**last, "output_ids": ids, "text": "".join(part.get("text") or "" for part in parts)}


def parse_counters(facts: dict[str, Any]) -> DraftCounters | None:
    """Return the counts of an answer's drafts: rounds by the number of drafts that each
    accepted; None without a drafter.
    """
    if "spec_verify_ct" not in facts:
        return None
    # Entry k counts the rounds that accepted k tokens, so position k was accepted in those of the
    # later entries.
    histogram = facts.get("spec_correct_drafts_histogram") or []
    accepted = tuple(
        sum(histogram[position + 1 :]) for position in range(max(0, len(histogram) - 1))
    )
    return DraftCounters(
        int(facts["spec_verify_ct"]), int(facts.get("spec_num_proposed_drafts") or 0), accepted
    )


def parse_layers(text: str) -> tuple[int, ...]:
    """Return the layers that a server captures, in our numbers, from the text of /server_info."""
    facts = json.loads(text)
    numbers = sorted(facts.get("return_aux_hidden_state_layer_ids") or ())
    if not numbers:
        raise UserError(
            "server=sglang: the server does not say which layers it captures; start it with "
            "--enable-return-aux-hidden-states --return-aux-hidden-state-layer-ids"
        )
    # DeepSeek and GLM read numbers of the EAGLE3 algorithm that do not begin with 1 as one layer
    # earlier.
    if numbers[0] != 1 and facts.get("aux_hidden_state_capture") not in ("dflash", "dspark"):
        raise UserError(
            "server=sglang: by --speculative-algorithm EAGLE3, layers that do not begin with 1 "
            "have other numbers in some models; start the server with --speculative-algorithm "
            "DFLASH"
        )
    return tuple(number + 1 for number in numbers)


def parse_states(parts: list[Any], num_layers: int) -> Tensor:
    """Return states [T, L, D] from nested lists: [t][L * D] of each prefilled chunk, then [L *
    D] of each decoded token.
    """
    rows = [row for part in parts for row in (part if isinstance(part[0], list) else [part])]
    return torch.tensor(rows, dtype=torch.float32).view(len(rows), num_layers, -1)
