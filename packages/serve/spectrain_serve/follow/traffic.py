"""Requests with their answers, as recorded: conversations for training, and rounds for the
watch. No header is recorded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import TypeAdapter, ValidationError

from spectrain.data.template_arguments import check_template_arguments
from spectrain.errors import UserError

from ..servers.base import DraftedRounds
from ..servers.openai import join_parts
from .checked_json import describe_violation
from .clock import LATEST
from .exchange import Exchange
from .kinds import KindRegistry

RoundsParser = Callable[[dict[str, Any]], DraftedRounds | None]
STORED_REQUEST_KEYS = (
    "model",
    "messages",
    "prompt",
    "tools",
    "chat_template_kwargs",
    "temperature",
    "add_special_tokens",
)


TokenId = Annotated[int, Ge(0), Le(2**31)]
NumTokens = Annotated[int, Ge(0), Le(2**31)]
RoundTokens = Annotated[int, Ge(0), Le(4096)]
"""Tokens of a round. No tree has more nodes, and the proof drafts as many as were recorded."""


@dataclass(frozen=True)
class RecordedConversation:
    """A prompt with its answer. Token ids are the server's own, where the answer holds them."""

    kind: str
    # By the clock of follow (`clock.py`).
    time: Annotated[float, Ge(0), Le(LATEST)]
    # What the request said: messages or prompt, tools, arguments of the template, and the
    # temperature.
    request: dict[str, Any]
    answer: str
    prompt_ids: list[TokenId] | None = None
    answer_ids: list[TokenId] | None = None
    # Accepted and drafted tokens of each round; () where the server does not tell.
    accepted: tuple[RoundTokens, ...] = ()
    drafted: tuple[RoundTokens, ...] = ()
    # Tokens of the answer by the server's own count; None where it does not tell, as in a stream
    # without usage.
    num_tokens: NumTokens | None = None

    @property
    def digest(self) -> str:
        """Return a hash of the prompt, by which duplicates are recognized."""
        content = json.dumps(
            [self.request.get("messages"), self.request.get("prompt")], sort_keys=True
        )
        return blake2b(content.encode(errors="replace"), digest_size=12).hexdigest()

    @property
    def mean_accepted(self) -> float | None:
        """Return the mean number of accepted tokens per draft; None without drafts, or where the
        server does not tell.
        """
        rounds = sum(1 for count in self.drafted if count)
        return sum(self.accepted) / rounds if rounds else None

    def to_row(self) -> dict[str, Any]:
        """Return the conversation as a row of a JSON Lines file."""
        return asdict(self)


RECORDED_ROW = TypeAdapter(RecordedConversation)


def parse_recorded(line: bytes) -> RecordedConversation:
    """Return the conversation of a line of a JSON Lines file; a UserError says what is wrong
    with it.
    """
    try:
        conversation = RECORDED_ROW.validate_json(line, strict=True)
    except ValidationError as error:
        raise UserError(describe_violation(error)) from error
    if not isinstance(
        conversation.request.get("messages") or conversation.request.get("prompt"), (str, list)
    ):
        raise UserError("request holds neither messages nor a prompt")
    return conversation


def parse_exchange(
    exchange: Exchange, kinds: KindRegistry, parse_rounds: RoundsParser
) -> RecordedConversation | None:
    """Return the conversation of a request and its answer; None for one that holds no single
    complete answer.

    A UserError says that it holds values which could not be read again, such as half of a
    character.
    """
    body = json.loads(exchange.request)
    is_chat = exchange.route.endswith("chat/completions")
    response = parse_response(exchange.response, is_chat)
    if response is None or len(response["choices"]) != 1 or body.get("n", 1) != 1:
        return None
    if brings_template(body):
        return None
    choice = response["choices"][0]
    answer = (choice.get("message") or {}).get("content") if is_chat else choice.get("text")
    if not isinstance(answer, str) or (is_chat and (choice.get("message") or {}).get("tool_calls")):
        return None
    num_tokens = count_answer_tokens(response, choice)
    rounds = parse_rounds(response)
    if rounds is None or not are_consistent(rounds, num_tokens):
        rounds = DraftedRounds((), ())
    conversation = RecordedConversation(
        kinds.classify(body, exchange.kind_header),
        exchange.time,
        {key: body[key] for key in STORED_REQUEST_KEYS if body.get(key) is not None},
        answer,
        prompt_ids=as_token_ids(response.get("prompt_token_ids") or choice.get("prompt_token_ids")),
        answer_ids=as_token_ids(choice.get("token_ids")),
        accepted=rounds.accepted,
        drafted=rounds.drafted,
        num_tokens=num_tokens,
    )
    return parse_recorded(json.dumps(conversation.to_row()).encode())


def brings_template(body: dict[str, Any]) -> bool:
    """Tell whether a request chose how its prompt is rendered, which the target's own chat
    template cannot repeat.
    """
    try:
        check_template_arguments(body.get("chat_template_kwargs"), "request")
    except UserError:
        return True
    return body.get("chat_template") is not None or bool(body.get("continue_final_message"))


def count_answer_tokens(response: dict[str, Any], choice: dict[str, Any]) -> int | None:
    """Return the tokens of an answer by its usage or else by its token ids; None where it holds
    neither.

    The parts of a stream are never counted, because a part may hold several tokens.
    """
    count = (response.get("usage") or {}).get("completion_tokens")
    if isinstance(count, int):
        return count
    ids = as_token_ids(choice.get("token_ids"))
    return None if ids is None else len(ids)


def are_consistent(rounds: DraftedRounds, num_tokens: int | None) -> bool:
    """Return whether rounds can be those of an answer: no round accepts more than it drafted, and
    all but the last one, which a limit may cut, emit no more tokens than there are."""
    is_possible = len(rounds.accepted) == len(rounds.drafted) and all(
        0 <= accepted <= drafted for accepted, drafted in zip(rounds.accepted, rounds.drafted)
    )
    emitted = sum(accepted + 1 for accepted in rounds.accepted[:-1])
    return is_possible and (num_tokens is None or emitted <= num_tokens)


def parse_response(content: bytes, is_chat: bool) -> dict[str, Any] | None:
    """Return a response, that of a stream joined; None for a stream that broke off, or an error."""
    text = content.lstrip()
    if not text.startswith(b"data:") and not text.startswith(b":"):
        response = json.loads(content)
        return response if isinstance(response, dict) and response.get("choices") else None
    events = [line[5:].strip() for line in text.splitlines() if line.startswith(b"data:")]
    if not events or events[-1] != b"[DONE]":
        return None
    parts = [json.loads(event) for event in events[:-1]]
    if any("error" in part for part in parts):
        return None
    return join_parts(parts, is_chat)


def as_token_ids(value: Any) -> list[int] | None:
    """Return a list of token ids, or None for anything else."""
    is_valid = (
        isinstance(value, list)
        and value
        and all(isinstance(token, int) and token >= 0 for token in value)
    )
    return list(value) if is_valid else None
