"""Servers with OpenAI's chat interface, and what the interfaces of vLLM and others share with
it.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, ClassVar

from spectrain.data.chat_template import Message
from spectrain.data.messages import Conversation, parse_tool_calls

from ..training.training_server import TrainingServer
from .base import (
    Completion,
    CompletionRequest,
    DraftedRounds,
    RequestTimes,
    ServerCapabilities,
    TimedStep,
)
from .errors import refuse_malformed
from .settings import ClientSettings

if TYPE_CHECKING:
    from .client import HttpClient


class OpenAIServer(TrainingServer):
    """A server with OpenAI's chat interface. It answers messages with text.

    Messages are sent without a chat template, which the server applies. Sampling settings that are
    off, such as top_k=0, are left to the server's defaults.
    """

    name = "openai"
    capabilities: ClassVar[ServerCapabilities] = ServerCapabilities()

    def __init__(self, config: ClientSettings) -> None:
        super().__init__(config)

    async def request_completion(
        self, client: HttpClient, request: CompletionRequest
    ) -> Completion:
        response, times = await self.request_response(client, request)
        with refuse_malformed("the server's answer"):
            return self.parse_response(response, isinstance(request.prompt, Conversation), times)

    async def request_response(
        self, client: HttpClient, request: CompletionRequest
    ) -> tuple[dict[str, Any], RequestTimes]:
        """Return the response of a request, the joined one of a stream, and when it came."""
        body = self.request_body(request)
        is_chat = isinstance(request.prompt, Conversation)
        path = "/chat/completions" if is_chat else "/completions"
        began = time.perf_counter()
        if not request.streams:
            response = await client.post(path, body, lambda answer: check_response(answer, is_chat))
            return response, RequestTimes(time.perf_counter() - began)
        body["stream_options"] = {"include_usage": True}
        parts = []
        arrivals = []
        async for part in client.stream(path, body):
            parts.append(part)
            if count := count_new_tokens(part):
                arrivals.append((time.perf_counter() - began, count))
        times = RequestTimes(time.perf_counter() - began, tuple(arrivals))
        with refuse_malformed("the streamed answer"):
            return check_response(join_parts(parts, is_chat), is_chat), times

    def request_body(self, request: CompletionRequest) -> dict[str, Any]:
        """Return the body of a request."""
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_tokens": request.max_new_tokens,
        }
        if request.seed is not None:
            body["seed"] = request.seed
        # OpenAI has no top_k, so a server is only asked for one that is on.
        if request.top_k:
            body["top_k"] = request.top_k
        if isinstance(request.prompt, Conversation):
            body |= conversation_body(request.prompt)
        else:
            body["prompt"] = [*request.prompt]
        return {**body, **(self.settings.extra or {})}

    def parse_response(
        self, response: dict[str, Any], is_chat: bool, times: RequestTimes
    ) -> Completion:
        """Return the answer in a response."""
        choice = response["choices"][0]
        ids = choice.get("token_ids")
        usage = response.get("usage") or {}
        prompt_ids = response.get("prompt_token_ids") or choice.get("prompt_token_ids")
        return Completion(
            parse_message(choice["message"])
            if is_chat
            else {"role": "assistant", "content": choice.get("text", "")},
            str(choice.get("finish_reason")),
            int(usage.get("completion_tokens") or len(ids or ())),
            times,
            token_ids=ids if isinstance(ids, list) else None,
            prompt_ids=prompt_ids if isinstance(prompt_ids, list) else None,
            rounds=self.parse_rounds(response),
            timed_steps=self.parse_steps(response),
        )

    def parse_rounds(self, response: dict[str, Any]) -> DraftedRounds | None:
        """Return the rounds that a response counts; None if it counts none."""
        return None

    def parse_steps(self, response: dict[str, Any]) -> tuple[TimedStep, ...]:
        """Return the forwards that a response times; () if it times none."""
        return ()


def conversation_body(conversation: Conversation) -> dict[str, Any]:
    """Return the messages and tools of a request; arguments of tool calls are JSON text, as
    OpenAI's interface has them.
    """
    messages = []
    for message in conversation.messages:
        calls = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(call["function"]["arguments"]),
                },
            }
            for call in message.get("tool_calls", ())
        ]
        messages.append({**message, "tool_calls": calls} if calls else message)
    return {
        "messages": messages,
        **({"tools": conversation.tools} if conversation.tools else {}),
        **({"documents": conversation.documents} if conversation.documents else {}),
        **(
            {"chat_template_kwargs": conversation.template_arguments}
            if conversation.template_arguments
            else {}
        ),
    }


def check_response(response: Any, is_chat: bool) -> dict[str, Any]:
    """Return a response whose first choice has an answer; raise a ValueError or KeyError for one
    that is malformed.
    """
    choice = response["choices"][0]
    if is_chat:
        parse_message(choice["message"])
    elif not isinstance(choice.get("text"), str):
        raise ValueError("there is no text")
    return dict(response)


def parse_message(answer: dict[str, Any]) -> Message:
    """Return the message of a chat completion: text, reasoning and tool calls as the server
    parsed them.
    """
    fields = {key: value for key, value in answer.items() if value is not None}
    reasoning = fields.get("reasoning_content", fields.get("reasoning"))
    message: Message = {"role": "assistant", "content": fields.get("content")}
    if reasoning:
        message["reasoning_content"] = str(reasoning)
    if calls := parse_tool_calls(fields.get("tool_calls"), "the answer"):
        message["tool_calls"] = calls
    return message


def count_new_tokens(part: dict[str, Any]) -> int:
    """Return the number of tokens in a part of a streamed answer; a part of text without token
    ids counts as one.
    """
    choice = next(iter(part.get("choices") or ()), None)
    if choice is None:
        return 0
    if isinstance(choice.get("token_ids"), list):
        return len(choice["token_ids"])
    delta = choice.get("delta") or choice
    return int(
        any(
            delta.get(key)
            for key in ("text", "content", "reasoning_content", "reasoning", "tool_calls")
        )
    )


def join_parts(parts: list[dict[str, Any]], is_chat: bool) -> dict[str, Any]:
    """Return the response that the parts of a streamed answer make up; of tool calls it keeps
    none.
    """
    choices = [choice for part in parts for choice in part.get("choices") or ()]
    deltas = [choice.get("delta") or choice for choice in choices]
    ids = [token for choice in choices for token in choice.get("token_ids") or ()]
    texts = {
        key: "".join(delta[key] for delta in deltas if isinstance(delta.get(key), str))
        for key in ("text", "content", "reasoning_content", "reasoning")
    }
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    joined: dict[str, Any] = {"finish_reason": reasons[-1] if reasons else None}
    joined |= (
        {"message": {key: texts[key] for key in texts if key != "text"}}
        if is_chat
        else {"text": texts["text"]}
    )
    if any("token_ids" in choice for choice in choices):
        joined["token_ids"] = ids
    response: dict[str, Any] = {"choices": [joined]}
    for part in parts:
        first: dict[str, Any] = next(iter(part.get("choices") or ()), {})
        named = [(part, key) for key in ("usage", "metrics", "sglext", "prompt_token_ids")]
        for source, key in (*named, (first, "prompt_token_ids")):
            if source.get(key):
                response[key] = source[key]
    return response
