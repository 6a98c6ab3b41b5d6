"""Regeneration of tool calls and reasoning: recorded results answer the calls by name, and what
ends early is counted.
"""

from __future__ import annotations

from typing import Any

import pytest

from spectrain.data.answers import parse_answer
from spectrain.data.chat import render_chat
from spectrain.data.chat_template import Message
from spectrain.data.messages import Conversation, parse_conversation
from spectrain.data.shards import PendingRow
from spectrain.regeneration.chat_progress import ChatProgress, GeneratedAnswer
from spectrain.regeneration.sampling import Sampling
from tests.data.chat_templates import SOURCES, make_template
from tests.data.test_templates import ASK, CALL, CALLING, RESULT, ROWS, SUNNY, TOOLS

ELSEWHERE = {"type": "function", "function": {"name": "get_news", "arguments": {}}}


def make_answer(
    content: str | None = None, *calls: dict[str, Any], ids: list[int] | None = None
) -> GeneratedAnswer:
    message: Message = {"role": "assistant", "content": content}
    return GeneratedAnswer(
        {**message, "tool_calls": [*calls]} if calls else message, "stop", 5, ids
    )


def answer_conversation(row: dict[str, Any], *answers: GeneratedAnswer) -> ChatProgress:
    """Answer a conversation with these answers, which must be exactly those that it needs."""
    progress = ChatProgress(PendingRow(0, parse_conversation(row, "the row"), 0), Sampling())
    for answer in answers:
        assert progress.next_prompt() is not None
        progress.add_answer(answer)
    assert progress.next_prompt() is None
    return progress


def make_call(name: str = "get_weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": {"city": "Lima"}}, **fields}


def test_a_recorded_result_answers_a_call_by_name() -> None:
    """Other arguments get the recorded result, under the recorded id; the answer to it is
    generated too.
    """
    progress = answer_conversation(
        ROWS["tool call"], make_answer(None, make_call(), ids=[1, 2]), make_answer("Mild.")
    )
    roles = [message["role"] for message in progress.messages]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert (
        progress.messages[1]["tool_calls"][0]["id"]
        == progress.messages[2]["tool_call_id"]
        == "call00001"
    )
    assert progress.messages[2]["content"] == "18 degrees" and progress.ended is None
    row = progress.finished_row
    assert row.answer_ids == [[1, 2], None] and row.tools == TOOLS and row.num_tokens == [5, 5]


def test_a_servers_own_id_stays() -> None:
    progress = answer_conversation(
        ROWS["tool call"], make_answer(None, make_call(id="own000001")), make_answer("Mild.")
    )
    assert progress.messages[2]["tool_call_id"] == "own000001"


def test_a_call_without_a_recorded_result_ends_the_conversation() -> None:
    """The conversation is kept up to the call, with the reason."""
    progress = answer_conversation(ROWS["tool call"], make_answer(None, ELSEWHERE))
    assert progress.messages[-1]["tool_calls"] == [ELSEWHERE]
    assert progress.finished_row.ended == "it calls get_news, for which no result is recorded"


def test_a_model_that_does_not_call_goes_on_with_the_next_question() -> None:
    """Recorded results that nobody asked for are left out."""
    row = {
        "messages": [ASK, CALLING, RESULT, SUNNY, {"role": "user", "content": "Thanks"}, SUNNY],
        "tools": TOOLS,
    }
    progress = answer_conversation(row, make_answer("I do not know."), make_answer("Welcome."))
    assert [message["role"] for message in progress.messages] == [
        "user",
        "assistant",
        "user",
        "assistant",
    ]


def test_a_model_that_calls_where_the_source_did_not_ends() -> None:
    assert answer_conversation(ROWS["chat"], make_answer(None, ELSEWHERE)).ended is not None


def test_results_are_answered_where_the_source_ends_with_them() -> None:
    """The model writes the answer that the source lacks."""
    row = {"messages": [ASK, CALLING, RESULT, SUNNY], "tools": TOOLS}
    second = {"id": "call00002", **{key: CALL[key] for key in ("type", "function")}}
    row["messages"] = [
        ASK,
        {**CALLING, "tool_calls": [CALL, second]},
        RESULT,
        {**RESULT, "tool_call_id": "call00002"},
        SUNNY,
    ]
    progress = answer_conversation(
        row, make_answer(None, make_call()), make_answer(None, make_call()), make_answer("Mild.")
    )
    assert [message["role"] for message in progress.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]


@pytest.mark.parametrize(
    "name", [name for name in SOURCES if make_template(name).renders_tool_calls]
)
def test_a_rendered_call_is_read_back(name: str) -> None:
    """What a template writes for a call, parse_answer reads: name and arguments."""
    template = make_template(name)
    conversation = Conversation([ASK, CALLING], TOOLS)
    opening = render_chat(template, conversation.up_to(1), for_generation=True)
    text = render_chat(template, conversation)
    written = text[len(opening) :] if text.startswith(opening) else text.rpartition("Quito?")[2]
    written = written.rstrip().removesuffix(template.turn_end)
    message = parse_answer(template, written, opening, TOOLS)
    assert [call["function"] for call in message.get("tool_calls", [])] == [CALL["function"]]


@pytest.mark.parametrize("name", ["qwen3", "glm45", "smollm3", "deepseek_r1"])
def test_reasoning_is_read_back(name: str) -> None:
    """Reasoning and content are apart, whoever opens the block of reasoning."""
    template = make_template(name)
    messages = ROWS["reasoning"]["messages"]
    opening = render_chat(template, messages[:1], for_generation=True)
    begins = "" if opening.rstrip().endswith("<think>") else "<think>\n"
    message = parse_answer(
        template, f"{begins}Two and two.\n</think>\n\nIt is four.", opening, None
    )
    assert message == {
        "role": "assistant",
        "content": "It is four.",
        "reasoning_content": "Two and two.",
    }


def test_a_call_that_cannot_be_read_stays_as_it_was_written() -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city"\n</tool_call>'
    message = parse_answer(make_template("qwen3"), text, "<|im_start|>assistant\n", TOOLS)
    assert message == {"role": "assistant", "content": text}
