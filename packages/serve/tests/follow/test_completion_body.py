"""Every setting of a request to this project's engine is honoured or refused by its name; none
is ignored.
"""

import json
from typing import Any

import pytest

from spectrain.decoding.acceptance import Greedy, Match
from spectrain_serve.follow.completion_body import (
    NEUTRAL_VALUES,
    ChatBody,
    TextBody,
    parse_completion,
)
from spectrain_serve.follow.limits import MAX_MESSAGES
from spectrain_serve.follow.requests import Refusal

MESSAGES = [{"role": "user", "content": "Hi"}]
WRONG: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 1.5, True, "5", [1], 1e300],
    "max_completion_tokens": [0, "5"],
    "temperature": [-0.1, 2.1, 1e308, 1e-9, True, "0.5", [0.5]],
    "top_p": [0, -1, 1.1, 1e-320, True, "0.5"],
    "top_k": [-2, 1.5, True, "5"],
    "seed": [1.5, "5", True, 2**63, -(2**70)],
    "stream": [1, 0, "true"],
    "stream_options": [5, {"other": True}],
    "model": [5, ["a"], "../../x"],
    "n": [0, 2, True, 1.0, "1"],
    "stop": ["a", ["a"], [""], 5],
    "logprobs": [True, 0, 5],
    "logit_bias": [{"5": 100}],
    "tools": [[{"type": "function"}]],
    "response_format": [{"type": "json_object"}],
    "stop_token_ids": [[5]],
    "unknown": [1, {}, "x"],
}
"""Values by the setting that a refusal has to name."""
WRONG_MESSAGES: list[Any] = [
    "hi", [1], [{}], [], {}, [{"role": "user"}], [{"role": 5, "content": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    [{"role": "tool", "content": "x"}], [{"role": "user", "content": "x", "extra": 1}],
    MESSAGES * (MAX_MESSAGES + 1),
]  # fmt: skip
WRONG_PROMPTS: list[Any] = [[True, False], [1.5], ["a"], [[1]], [None], {}, 5]


def parse_chat(**fields: Any) -> ChatBody | TextBody:
    return parse_completion(json.dumps({"messages": MESSAGES, **fields}).encode(), is_chat=True)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
@pytest.mark.parametrize("is_chat", [True, False])
def test_what_the_engine_does_not_have_is_refused_by_name(
    name: str, value: Any, is_chat: bool
) -> None:
    prompt = {"messages": MESSAGES} if is_chat else {"prompt": "Hi"}
    with pytest.raises(Refusal, match=f"^{name}") as refusal:
        parse_completion(json.dumps({**prompt, name: value}).encode(), is_chat)
    assert refusal.value.status == 400 and "\n" not in str(refusal.value)


@pytest.mark.parametrize("messages", WRONG_MESSAGES)
def test_messages_have_their_form(messages: Any) -> None:
    with pytest.raises(Refusal, match=r"^messages"):
        parse_chat(messages=messages)


@pytest.mark.parametrize("prompt", WRONG_PROMPTS)
def test_a_prompt_is_text_or_token_ids(prompt: Any) -> None:
    with pytest.raises(Refusal, match="^prompt: give a text or a list of token ids$"):
        parse_completion(json.dumps({"prompt": prompt}).encode(), is_chat=False)


def test_what_is_honoured() -> None:
    body = parse_chat(temperature=0.7, top_p=0.5, top_k=20, seed=3, max_tokens=9)
    rule = body.make_rule(vocab_size=100)
    assert isinstance(rule, Match)
    assert (rule.temperature, rule.top_k, rule.top_p, rule.seed) == (0.7, 20, 0.5, 3)
    assert body.find_limit(64) == 9 and parse_chat().find_limit(64) == 64
    assert parse_chat(max_completion_tokens=7).find_limit(64) == 7
    assert isinstance(parse_chat(top_p=0.5).make_rule(100), Greedy)


def test_values_that_change_nothing_are_taken() -> None:
    for name, values in NEUTRAL_VALUES.items():
        for value in (*values, None):
            assert parse_chat(**{name: value}) == parse_chat()
    assert parse_chat(user="a", metadata={"a": "b"}) == parse_chat()


def test_two_limits_that_differ_are_refused() -> None:
    with pytest.raises(Refusal, match="^max_tokens: max_completion_tokens says something else"):
        parse_chat(max_tokens=1, max_completion_tokens=2)
