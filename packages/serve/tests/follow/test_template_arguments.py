"""Chat templates: recorded requests cannot choose them."""

import json
from typing import Any

import pytest

from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain_serve.follow.examples import tokenize_conversation
from spectrain_serve.follow.exchange import Exchange
from spectrain_serve.follow.kinds import KindRegistry
from spectrain_serve.follow.traffic import RecordedConversation, parse_exchange
from spectrain_serve.servers.base import DraftedRounds
from tests.data.test_template_limits import MESSAGES, NAMES


def exchange_of(**fields: Any) -> Exchange:
    answer = {"choices": [{"index": 0, "message": {"content": "Hello"}}]}
    request = json.dumps({"messages": MESSAGES[:1], **fields}).encode()
    return Exchange("/v1/chat/completions", request, json.dumps(answer).encode(), time=1.0)


def record(exchange: Exchange) -> RecordedConversation | None:
    return parse_exchange(exchange, KindRegistry(4), lambda response: DraftedRounds((), ()))


@pytest.mark.parametrize("name", NAMES)
def test_a_request_names_no_argument_of_the_renderer(name: str, tiny: Target) -> None:
    arguments = {"enable_thinking": True, name: "x"}
    row = {"messages": MESSAGES, "chat_template_kwargs": arguments}
    recorded = RecordedConversation("a", 0.0, row, "Hello")
    with pytest.raises(
        UserError,
        match=(rf"^recorded request: chat_template_kwargs\.{name} is an argument of the renderer"),
    ):
        tokenize_conversation(recorded, tiny)
    assert record(exchange_of(chat_template_kwargs=arguments)) is None


def test_variables_of_a_template_stay_allowed() -> None:
    arguments = {"enable_thinking": False, "date_string": "today"}
    recorded = record(exchange_of(chat_template_kwargs=arguments))
    assert recorded is not None and recorded.request["chat_template_kwargs"] == arguments
    assert record(exchange_of(chat_template="x")) is None
