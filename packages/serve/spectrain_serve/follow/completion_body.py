"""What a request to this project's engine may hold: OpenAI's settings that it has, each checked,
and no other ones.

A setting that would be ignored is refused, so that an answer is never silently other than
requested.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Match
from spectrain.decoding.acceptance.matching import LEAST_TOP_P

from .limits import MAX_MESSAGES, MAX_PROMPT_CHARACTERS
from .requests import Refusal, parse_body

LEAST_TEMPERATURE = 0.01
"""Below it, logits divided by the temperature leave the range of their type."""
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stop": ("", []),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "ignore_eos": (False,),
    "store": (False,),
}
"""Settings that this engine does not have, with the values by which they change nothing."""
UNREAD_KEYS = {
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "service_tier",
    "request_id",
}
"""Keys that say who sends a request, or where it is accounted. They change no answer."""
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class RequestMessage(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    reasoning_content: str | None = None

    def to_message(self) -> dict[str, Any]:
        """Return the message as chat templates take it."""
        content = (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content)
        )
        return {**self.model_dump(exclude_none=True), "content": content}


class StreamOptions(BaseModel):
    """Options of a stream, whose last part holds the usage in any case."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class CompletionBody(BaseModel):
    """What both kinds of requests hold."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    # Without one, decoding is greedy.
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(ge=LEAST_TOP_P, le=1)] = 1.0
    # -1 and 0 sample from the whole vocabulary.
    top_k: Annotated[int, Field(ge=-1)] = 0
    seed: Seed | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    def make_rule(self, vocab_size: int) -> AcceptanceRule:
        """Return the rule that draws the answer. Without a seed, every request has draws of its
        own.
        """
        if self.temperature == 0:
            return Greedy()
        seed = secrets.randbelow(2**63) if self.seed is None else self.seed
        return Match(self.temperature, min(max(0, self.top_k), vocab_size), self.top_p, seed)

    def find_limit(self, default: int) -> int:
        """Return how many new tokens are requested."""
        return self.max_completion_tokens or self.max_tokens or default

    @property
    @abstractmethod
    def num_characters(self) -> int:
        """Return the characters of the prompt."""


class ChatBody(CompletionBody):
    """A request that continues messages."""

    messages: Annotated[list[RequestMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def num_characters(self) -> int:
        return sum(
            len(message.to_message()["content"]) + len(message.reasoning_content or "")
            for message in self.messages
        )


class TextBody(CompletionBody):
    """A request that continues a text or token ids."""

    prompt: str | list[int]
    add_special_tokens: bool = False

    @property
    def num_characters(self) -> int:
        return len(self.prompt)


def parse_completion(content: bytes, is_chat: bool) -> ChatBody | TextBody:
    """Return the checked body of a request; a Refusal says in one sentence what is wrong with
    it.
    """
    body = {
        key: value
        for key, value in parse_body(content).items()
        if value is not None and key not in UNREAD_KEYS
    }
    for key, neutral in NEUTRAL_VALUES.items():
        if key in body and not any(
            type(value) is type(body[key]) and value == body[key] for value in neutral
        ):
            raise Refusal(400, f"{key}: this engine does not support it; leave it out")
        body.pop(key, None)
    messages = body.get("messages")
    if is_chat and isinstance(messages, list):
        body["messages"] = [
            drop_empty(message) if isinstance(message, dict) else message for message in messages
        ]
    try:
        parsed: ChatBody | TextBody = (ChatBody if is_chat else TextBody).model_validate(body)
    except ValidationError as error:
        raise Refusal(400, describe_problem(error)) from error
    check_values(parsed)
    return parsed


def drop_empty(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without the empty fields that clients send back from an answer, such as
    tool_calls=[].
    """
    return {
        key: value for key, value in message.items() if key == "content" or value not in (None, [])
    }


def check_values(body: ChatBody | TextBody) -> None:
    """Raise a Refusal for values that no single field can check."""
    if 0 < body.temperature < LEAST_TEMPERATURE:
        raise Refusal(400, f"temperature: use 0, or {LEAST_TEMPERATURE} to 2")
    if (
        body.max_tokens
        and body.max_completion_tokens
        and body.max_tokens != body.max_completion_tokens
    ):
        raise Refusal(
            400, "max_tokens: max_completion_tokens says something else; leave one of them out"
        )
    if body.num_characters > MAX_PROMPT_CHARACTERS:
        raise Refusal(
            400, f"the prompt has more than {MAX_PROMPT_CHARACTERS} characters; shorten it"
        )


def describe_problem(error: ValidationError) -> str:
    """Describe the first problem of a body."""
    first = error.errors(include_url=False, include_context=False)[0]
    key = ".".join(map(str, first["loc"]))[:100]
    if first["loc"][:1] == ("prompt",) and first["type"] != "missing":
        return "prompt: give a text or a list of token ids"
    if first["type"] == "extra_forbidden":
        return f"{key}: this engine has no such setting; leave it out"
    if first["type"] == "missing":
        return f"{key}: it is missing"
    return f"{key}: {first['msg'][0].lower()}{first['msg'][1:]}"
