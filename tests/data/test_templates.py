"""Every row is used completely, reported or refused, by templates with the behaviour of the
families that people run.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from typing import Any

import pytest

from spectrain.data.chat import (
    KIND_CODES,
    Example,
    render_chat,
    tokenize_conversation,
    tokenize_prompt,
)
from spectrain.data.chat_template import ChatTemplate
from spectrain.data.messages import Conversation, parse_conversation
from spectrain.errors import UserError
from tests.data.chat_templates import SOURCES, make_template

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Quito"}},
}
ASK = {"role": "user", "content": "Weather in Quito?"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {
    "role": "tool",
    "content": "18 degrees",
    "tool_call_id": "call00001",
    "name": "get_weather",
}
SUNNY = {"role": "assistant", "content": "It is mild there."}
THINKING = {
    "role": "assistant",
    "content": "It is four.",
    "reasoning_content": "Two and two make four.",
}

ROWS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello there!"}]},
    "two turns": {"messages": [ASK, SUNNY, {"role": "user", "content": "Ta"},
        {"role": "assistant", "content": "Welcome."}]},
    "system": {"messages": [{"role": "system", "content": "Be kind."}, ASK, SUNNY]},
    "developer": {"messages": [{"role": "developer", "content": "Be kind."}, ASK, SUNNY]},
    "reasoning": {"messages": [{"role": "user", "content": "2 + 2?"}, THINKING]},
    "reasoning in two turns": {
        "messages": [{"role": "user", "content": "2 + 2?"}, THINKING,
            {"role": "user", "content": "Sure?"},
                     {"role": "assistant", "content": "Yes, four.",
                         "thinking": "I check it once more."}]
    },
    "tool call": {"messages": [ASK, CALLING, RESULT, SUNNY], "tools": TOOLS},
    "call that ends": {"messages": [ASK, CALLING], "tools": json.dumps(TOOLS)},
    "ShareGPT call": {
        "conversations": [{"from": "human", "value": "Weather in Quito?"},
                          {"from": "function_call",
                              "value": '{"name": "get_weather", "arguments": {"city": "Quito"}}'},
                          {"from": "observation", "value": "18 degrees"},
                          {"from": "gpt", "value": "It is mild there."}]
    },
    "thinking off": {"messages": [ASK, SUNNY], "chat_template_kwargs": {"enable_thinking": False}},
    "documents": {"messages": [ASK, SUNNY],
        "documents": [{"title": "Climate", "text": "Quito is mild."}]},
    "unknown keys": {"messages": [{**ASK, "weight": 0.5}, SUNNY], "source": "a forum"},
}  # fmt: skip
NEVER_GENERATED = ("Weather in Quito?", "18 degrees", "Be kind.", "2 + 2?", "Quito is mild.")


def list_texts(conversation: Conversation) -> list[tuple[str, str]]:
    """List the texts of a conversation, each with the word that a report about it has."""
    texts = [
        (str(message["content"]), "content")
        for message in conversation.messages
        if message["content"]
    ]
    for message in conversation.messages:
        texts += [
            (message[name], "reasoning")
            for name in ("reasoning_content", "thinking")
            if name in message
        ]
        texts += [(call["function"]["name"], "tool call") for call in message.get("tool_calls", ())]
    texts += [("The weather of a city.", "tools")] * bool(conversation.tools)
    return [*texts, *[(document["text"], "documents") for document in conversation.documents or ()]]


def decode_generated(template: ChatTemplate, example: Example, kind: str | None = None) -> str:
    tokens = [
        token
        for token, code in zip(example.tokens, example.kinds)
        if (code if kind is None else code == KIND_CODES[kind])  # type: ignore[index]
    ]
    return str(template.tokenizer.decode(tokens))


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", SOURCES)
def test_a_row_is_used_reported_or_refused(name: str, row: str) -> None:
    """Whatever a row says stands in the tokens, or in the report, or in the refusal; only what
    the model writes has a kind.
    """
    template = make_template(name)
    unread = Counter[str]()
    try:
        conversation = parse_conversation(ROWS[row], "the row", unread=unread)
        examples = tokenize_conversation(template, conversation, unread=unread)
    except UserError as error:
        assert row in ("tool call", "call that ends", "ShareGPT call", "system", "developer"), error
        assert "\n" not in str(error) and ("chat template" in str(error))
        return
    rendered = "\n".join(template.tokenizer.decode(example.tokens) for example in examples)
    escaped = rendered + json.dumps(rendered)
    for text, word in list_texts(conversation):
        assert text in escaped or any(word in line for line in unread), (text, unread)
    if row == "unknown keys":
        assert {"key 'weight' of a message", "key 'source' of a row"} <= unread.keys()
    for example in examples:
        assert len(example.tokens) == len(example.mask) == len(example.kinds)
        written = decode_generated(template, example)
        assert not any(text in written for text in NEVER_GENERATED), written
    generated = "".join(decode_generated(template, example) for example in examples)
    for message in conversation.messages:
        if message["role"] == "assistant":
            assert str(message["content"] or "") in generated
            for call in message.get("tool_calls", ()):
                assert call["function"]["name"] in generated and "Quito" in generated


@pytest.mark.parametrize("name", SOURCES)
def test_tokens_are_those_of_apply_chat_template(name: str) -> None:
    """The tokens of an example are the template's own, and the prompt's what it renders for
    generation.
    """
    template = make_template(name)
    messages = ROWS["two turns"]["messages"]
    (example,) = tokenize_conversation(template, messages)[-1:]
    own: Any = template.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
    assert example.tokens == own["input_ids"]
    prompt: Any = template.tokenizer.apply_chat_template(
        messages[:3], tokenize=True, add_generation_prompt=True, return_dict=True
    )
    assert tokenize_prompt(template, messages[:3]) == prompt["input_ids"]


def test_generation_marks_and_prefixes_agree() -> None:
    """The mask of {% generation %} is that of the rendered prefixes, token by token, for every
    row that both can read.
    """
    marked = make_template("smollm3")
    plain = ChatTemplate(make_template("smollm3").tokenizer)
    assert marked.marks_generation
    plain.__dict__["marks_generation"] = False
    for row in ROWS.values():
        conversation = parse_conversation(row, "the row")
        assert tokenize_conversation(marked, conversation) == tokenize_conversation(
            plain, conversation
        )


SPANS = {
    "qwen3": (
        "<think>\nTwo and two make four.\n</think>\n\n",
        "It is four.<|im_end|>",
        "<tool_call>",
    ),
    "glm45": ("\n<think>Two and two make four.</think>", "\nIt is four.", "<tool_call>get_weather"),
    "gpt_oss": (
        (
            "analysis<|message|>Two and two make "
            "four.<|end|><|start|>assistant<|channel|>final<|message|>"
        ),
        "It is four.<|return|>",
        "to=functions.get_weather",
    ),
    "smollm3": (
        "<think>\nTwo and two make four.\n</think>\n",
        "It is four.<|im_end|>",
        "<tool_call>",
    ),
}


@pytest.mark.parametrize("name", SPANS)
def test_kinds_are_the_templates_spans(name: str) -> None:
    """Reasoning, content and tool calls of an answer are told apart, with the strings that begin
    and end them.
    """
    template = make_template(name)
    reasoning, content, call = SPANS[name]
    (example,) = tokenize_conversation(template, ROWS["reasoning"]["messages"])
    assert decode_generated(template, example, "reasoning").strip() == reasoning.strip()
    assert decode_generated(template, example, "content").strip().endswith(content.strip())
    conversation = parse_conversation(ROWS["tool call"], "the row")
    calls = "".join(
        decode_generated(template, example, "tool_calls")
        for example in tokenize_conversation(template, conversation)
    )
    assert call in calls and "Quito" in calls and "mild" not in calls


def test_train_on_narrows_the_mask() -> None:
    """Only the kinds that train_on names carry loss; the kinds themselves stay."""
    template = make_template("qwen3")
    messages = ROWS["reasoning"]["messages"]
    (full,) = tokenize_conversation(template, messages)
    (content,) = tokenize_conversation(template, messages, train_on=["content"])
    (reasoning,) = tokenize_conversation(template, messages, train_on=["reasoning"])
    assert content.kinds == reasoning.kinds == full.kinds
    assert [a or b for a, b in zip(content.mask, reasoning.mask)] == full.mask
    assert (
        not any(a and b for a, b in zip(content.mask, reasoning.mask))
        and any(content.mask)
        and any(reasoning.mask)
    )


def test_arguments_of_the_template_reach_it() -> None:
    """enable_thinking=false changes the prompt, given for all rows or by one row."""
    template = make_template("qwen3")
    messages = ROWS["chat"]["messages"][:1]
    off = template.with_arguments({"enable_thinking": False})
    assert "</think>" not in render_chat(template, messages, True) and "</think>" in render_chat(
        off, messages, True
    )
    row = parse_conversation(
        {**ROWS["chat"], "chat_template_kwargs": {"enable_thinking": False}}, "the row"
    ).up_to(1)
    assert tokenize_prompt(template, row) == tokenize_prompt(off, messages)
    assert off.facts() == {
        "sha256": template.facts()["sha256"],
        "arguments": {"enable_thinking": False},
    }


def test_a_target_without_template_reads_plain_text_alone() -> None:
    """A conversation is refused with what to do; a document and a prompt are tokenized."""
    template = make_template("base")
    with pytest.raises(UserError, match=r"target\.chat_template=FILE.*data=text"):
        tokenize_conversation(template, ROWS["chat"]["messages"])
    (document,) = tokenize_conversation(template, Conversation([], text="One two three."))
    assert document.mask[0] is False and all(document.mask[1:])
    assert (
        tokenize_prompt(template, Conversation([], text="One two"))
        == template.tokenizer("One two")["input_ids"]
    )


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "llama31", "mistral"])
def test_generated_ids_stay(name: str) -> None:
    """Where a row has the ids of an answer, training and later prompts use them, though the text
    has other ids.
    """
    template = make_template(name)
    text = "Hello there!"
    ids = [
        token
        for letter in text
        for token in template.tokenizer(letter, add_special_tokens=False)["input_ids"]
    ]
    end = template.tokenizer(template.turn_end, add_special_tokens=False)["input_ids"]
    assert ids != template.tokenizer(text, add_special_tokens=False)["input_ids"]
    messages = [
        ASK,
        {"role": "assistant", "content": text},
        {"role": "user", "content": "Bye"},
        SUNNY,
    ]
    prompt = tokenize_prompt(template, messages[:1])
    row = {"messages": messages, "answer_ids": [[*ids, *end], None]}
    conversation = parse_conversation(row, "the row")
    if name not in ("gpt_oss", "qwen3"):  # these render an answer differently once others follow
        assert tokenize_prompt(template, conversation.up_to(3))[: len(prompt) + len(ids)] == [
            *prompt,
            *ids,
        ]
    first = tokenize_conversation(template, conversation.up_to(2))[0]
    assert first.tokens[: len(prompt) + len(ids)] == [*prompt, *ids]
    assert all(first.mask[len(prompt) : len(prompt) + len(ids) + len(end)]) and not any(
        first.mask[: len(prompt)]
    )


def test_an_end_that_the_model_did_not_write_carries_no_loss() -> None:
    """The end of turn behind an answer that was cut is context."""
    template = make_template("qwen3")
    ids = template.tokenizer("Hello there", add_special_tokens=False)["input_ids"]
    row = {"messages": [ASK, {"role": "assistant", "content": "Hello there"}], "answer_ids": [ids]}
    (example,) = tokenize_conversation(template, parse_conversation(row, "the row"))
    assert [token for token, counts in zip(example.tokens, example.mask) if counts] == ids
    assert "<|im_end|>" in template.tokenizer.decode(example.tokens[example.mask.index(True) :])


def test_kinds_of_generated_ids_are_exact_beyond_ascii() -> None:
    """Characters that take several tokens move no boundary between kinds."""
    template = make_template("qwen3")
    tokenizer: Any = template.tokenizer
    reasoning = "<think>\n\u4e2d\u6587 \u03b1\u03b2 \U0001f389\n</think>"
    content = "\n\nYes.<|im_end|>"
    parts = [
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (reasoning, content)
    ]
    row = {
        "messages": [ASK, {"role": "assistant", "content": reasoning + "Yes."}],
        "answer_ids": [[*parts[0], *parts[1]]],
    }
    (example,) = tokenize_conversation(template, parse_conversation(row, "the row"))
    assert (
        decode_generated(template, example, "reasoning") == reasoning
        and decode_generated(template, example, "content") == content
    )


def test_generated_ids_stand_once_where_a_template_marks_parts() -> None:
    """An answer of two {% generation %} blocks is spliced once."""
    tokenizer: Any = copy.deepcopy(make_template("qwen3").tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == "
        "'assistant' %}{% generation %}{{ m['content'][:5] }}{% endgeneration %}{% generation "
        "%}{{ m['content'][5:] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + "
        "'<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
        "'<|im_start|>assistant\n' }}{% endif %}"
    )
    template = ChatTemplate(tokenizer)
    ids = tokenizer("Hello there<|im_end|>", add_special_tokens=False)["input_ids"]
    row = {"messages": [ASK, {"role": "assistant", "content": "Hello there"}], "answer_ids": [ids]}
    (example,) = tokenize_conversation(template, parse_conversation(row, "the row"))
    assert (
        template.marks_generation
        and [token for token, counts in zip(example.tokens, example.mask) if counts] == ids
    )


DATED = """{%- if not date_string is defined %}{%- if strftime_now is defined %}
{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}{%- endif %}
{{- strftime_now('%H:%M:%S') + ' ' + date_string }}
{%- for message in messages %}{{ '<' + message.role + '>' + message.content }}{% endfor %}"""


def make_dated_template(source: str) -> ChatTemplate:
    tokenizer = copy.copy(make_template("qwen2.5").tokenizer)
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer)


def test_a_template_with_a_clock_renders_one_date() -> None:
    """Data has the same text on every day, unless an argument sets the date; answers to somebody
    who asks now have today's.
    """
    template = make_dated_template(DATED)
    assert template.render([ASK]) == f"00:00:00 26 Jul 2024<user>{ASK['content']}"
    assert (
        template.with_arguments({"date_string": "then"})
        .render([ASK])
        .startswith("00:00:00 then<user>")
    )
    assert "26 Jul 2024" not in template.with_clock().render([ASK])
    assert template.facts()["date"] == "2024-07-26" and "date" not in template.with_clock().facts()


def test_a_template_with_a_hidden_clock_is_refused() -> None:
    """A format that the template computes cannot be fixed; a comment and a test of the name can
    stay.
    """
    for source in (
        '{% set form = "%d" %}{{ strftime_now(form) }}',
        '{% set now = strftime_now %}{{ now("%d") }}',
    ):
        with pytest.raises(UserError, match="differs from day to day"):
            make_dated_template(source).render([ASK])
    assert (
        make_dated_template(
            "{# strftime_now #}{% if strftime_now is defined %}yes{% endif %}"
        ).render([ASK])
        == "yes"
    )
