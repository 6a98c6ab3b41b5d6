"""Malformed rows: each is one clear sentence that names the file and the line, with exit status
2, and nothing is written.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from spectrain import files
from spectrain.cli.main import main
from spectrain.data.readers import ConversationReader, JsonlReader
from spectrain.data.text import TextReader
from spectrain.data.tokens import TokensReader
from spectrain.errors import UserError
from tests.data.chat_templates import make_template

USER = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello!"}


def call(arguments: Any = None, name: Any = "look", **fields: Any) -> dict[str, Any]:
    return {
        "function": {"name": name, "arguments": {} if arguments is None else arguments},
        **fields,
    }


def invoke(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def result(**fields: Any) -> dict[str, Any]:
    return {"role": "tool", "content": "18", **fields}


CHATS: dict[str, tuple[Any, str]] = {
    "no object": ("Hi", "it holds no conversation"),
    "a list": ([USER], "it is a list"),
    "no messages": ({"text": "Hi"}, "it holds no conversation"),
    "messages of a wrong type": ({"messages": "Hi"}, "it holds no conversation"),
    "a turn of a wrong type": ({"messages": ["Hi", HELLO]}, "message 1: it is no object"),
    "no role": ({"messages": [{"content": "Hi"}, HELLO]},
        r"message 1: it has an unknown role \(None\)"),
    "unknown role": ({"messages": [{"role": "usr", "content": "Hi"}, HELLO]},
        "unknown role .'usr'"),
    "a role of a wrong type": ({"messages": [{"role": 3, "content": "Hi"}, HELLO]},
        r"unknown role \(3\)"),
    "content of a wrong type": ({"messages": [{"role": "user", "content": 3}, HELLO]},
        "message 1: its content is neither"),
    "unknown parts": ({"messages": [{"role": "user", "content": [{"type": "video"}]}, HELLO]},
        "its content is neither"),
    "an image without a file": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, HELLO]},
        "an image has no file"),
    "an image with a long name": (
        {"messages": [{"role": "user", "content": [{"type": "image", "path": "x" * 5000}]}, HELLO]},
        "there is no image "),
    "an image at nobody's home": (
        {"messages": [{"role": "user", "content": [{"type": "image", "path": "~nobody5/x.png"}]},
            HELLO]},
        "there is no image "),
    "a question without content": ({"messages": [{"role": "user"}, HELLO]},
        "message 1: it has no content"),
    "a result without content": ({"messages": [USER, invoke(call()), {"role": "tool"}]},
        "message 3: it has no content"),
    "half a character": ({"messages": [{"role": "user", "content": "\ud800"}, HELLO]},
        "half of a character"),
    "half a character in a call": ({"messages": [USER, invoke(call({"city": "\ud800"}))]},
        "half of a character"),
    "half a character in the name of an argument": (
        {"messages": [USER, invoke(call({"\udfff": 1}))]}, "half of a character"),
    "half a character in a function's name": (
        {"messages": [USER, invoke(call(name="a\ud800"))]}, "half of a character"),
    "half a character in a tool": (
        {"messages": [USER, HELLO],
            "tools": [{"function": {"name": "a", "description": "\ud800"}}]},
        "half of a character"),
    "half a character in a document": (
        {"messages": [USER, HELLO], "documents": [{"text": "\ud800"}]}, "half of a character"),
    "half a character in a template argument": (
        {"messages": [USER, HELLO], "chat_template_kwargs": {"date": ["\ud800"]}},
        "half of a character"),
    "reasoning of a wrong type": (
        {"messages": [USER, {**HELLO, "reasoning_content": ["no"]}]},
        "its reasoning_content is no text"),
    "no answer": ({"messages": [USER]}, "no assistant turn to learn from"),
    "empty answers": ({"messages": [USER, {"role": "assistant", "content": " "}]},
        "its answers are empty"),
    "an answer of nothing": ({"messages": [USER, {"role": "assistant", "content": None}]},
        "its answers are empty"),
    "calls of a wrong type": ({"messages": [USER, {**HELLO, "tool_calls": 3}]},
        "tool_calls is no list"),
    "a call of a wrong type": ({"messages": [USER, invoke(3)]}, "tool_calls is no list"),
    "a call without a function": ({"messages": [USER, invoke({"id": "a"})]},
        "a tool call names no function"),
    "a function's name of a wrong type": ({"messages": [USER, invoke(call(name=3))]},
        "a tool call names no function"),
    "arguments that are no JSON": (
        {"messages": [USER, invoke(call("{city: Quito"))]},
        "the arguments of the tool call look hold no"),
    "arguments that are no object": (
        {"messages": [USER, invoke(call("[1, 2]"))]},
        "arguments of the tool call look are no object"),
    "an id of a wrong type": ({"messages": [USER, invoke(call(id=3))]},
        "the id of the tool call look is no text"),
    "one id twice": ({"messages": [USER, invoke(call(id="a"), call(id="a"))]},
        "two tool calls have the id a"),
    "calls by the user": ({"messages": [{**USER, "tool_calls": [call()]}, HELLO]},
        "the role user makes tool calls"),
    "a result without a call": ({"messages": [USER, result(), HELLO]}, "answers no call before it"),
    "a result before its call": (
        {"messages": [USER, result(tool_call_id="a"), invoke(call(id="a")), HELLO]},
        "answers no call before it"),
    "a result without its id": ({"messages": [USER, invoke(call(id="a")), result(), HELLO]},
        "has no tool_call_id"),
    "a result of another call": (
        {"messages": [USER, invoke(call(id="a")), result(tool_call_id="b"), HELLO]},
        "tool_call_id b no call before it has"),
    "a call answered twice": (
        {"messages": [USER, invoke(call(id="a"), call(id="b")), result(tool_call_id="a"),
            result(tool_call_id="a"), HELLO]},
        "tool_call_id a was answered already"),
    "a result's id of a wrong type": (
        {"messages": [USER, invoke(call(id="a")), result(tool_call_id=3), HELLO]},
        "its tool_call_id is no text"),
    "tools that are no JSON": ({"messages": [USER, HELLO], "tools": "[{"},
        "tools hold no valid JSON"),
    "tools of a wrong type": ({"messages": [USER, HELLO], "tools": 3}, "tools is no list"),
    "a tool without a name": ({"messages": [USER, HELLO], "tools": [{"type": "function"}]},
        "a tool has no name"),
    "documents of a wrong type": ({"messages": [USER, HELLO], "documents": ["no"]},
        "documents hold no valid JSON"),
    "template arguments of a wrong type": (
        {"messages": [USER, HELLO], "chat_template_kwargs": [1]},
        "chat_template_kwargs is no object"),
    "ids for other turns": (
        {"messages": [USER, HELLO], "answer_ids": [[1], [2]]},
        "one list for each of the 1 assistant turns"),
    "ids that are no integers": ({"messages": [USER, HELLO], "answer_ids": [["a"]]},
        "no list of token ids"),
    "ids that no tokenizer has": ({"messages": [USER, HELLO], "answer_ids": [[1 << 70]]},
        "no list of token ids"),
}  # fmt: skip
TOKENS: dict[str, tuple[Any, str]] = {
    "no ids": ({"loss_mask": [1]}, "it holds no input_ids"),
    "ids of a wrong type": (
        {"input_ids": "1 2", "loss_mask": [0, 1]},
        "input_ids is no list of integers",
    ),
    "nested ids": (
        {"input_ids": [[1, 2]], "loss_mask": [0, 1]},
        "input_ids is no list of integers",
    ),
    "fractions": ({"input_ids": [1.5, 2], "loss_mask": [0, 1]}, "input_ids is no list of integers"),
    "truth values": (
        {"input_ids": [True, False], "loss_mask": [0, 1]},
        "input_ids is no list of integers",
    ),
    "an id that no tokenizer has": (
        {"input_ids": [1, 1 << 31], "loss_mask": [0, 1]},
        "above 2147483647",
    ),
    "several texts by position": (
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "position_ids": [0, 1, 0]},
        "its position_ids do not count up by one, as where a row packs several texts",
    ),
    "several texts by their numbers": (
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "seq_idx": [0, 0, 1]},
        "its seq_idx name several texts",
    ),
    "several texts by their lengths": (
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "seq_lengths": [2, 1]},
        "its seq_lengths names several texts",
    ),
    "no tokens": ({"input_ids": [], "loss_mask": []}, "its input_ids are empty"),
    "negative ids": ({"input_ids": [1, -2], "loss_mask": [0, 1]}, "below 0"),
    "no mask": ({"input_ids": [1, 2]}, "nothing says which tokens carry loss"),
    "a mask of another length": (
        {"input_ids": [1, 2], "loss_mask": [1]},
        "2 input_ids and 1 loss_mask",
    ),
    "a mask of other numbers": (
        {"input_ids": [1, 2], "assistant_masks": [0, 7]},
        "other values than 0 and 1",
    ),
    "labels that are shifted": ({"input_ids": [1, 2], "labels": [2, -100]}, "do not shift labels"),
}
TEXTS: dict[str, tuple[Any, str]] = {
    "no text": ({"body": "Hi"}, "it holds no text in 'text'"),
    "a text of a wrong type": ({"text": 3}, "it holds no text in 'text'"),
    "an empty text": ({"text": " "}, "it holds no text in 'text'"),
    "a prompt without a completion": ({"prompt": "Hi"}, "its prompt has no completion"),
}
CASES = [
    *((JsonlReader, name, *case) for name, case in CHATS.items()),
    *((TokensReader, name, *case) for name, case in TOKENS.items()),
    *((TextReader, name, *case) for name, case in TEXTS.items()),
]


@pytest.mark.parametrize(
    "reader, name, row, sentence", CASES, ids=[f"{case[0].__name__}: {case[1]}" for case in CASES]
)
def test_a_malformed_row_is_a_single_sentence(
    reader: type[ConversationReader], name: str, row: Any, sentence: str, tmp_path: Path
) -> None:
    """The sentence names file and line, what is wrong and what to write."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=sentence) as caught:
        reader(path=str(path)).load_conversations()  # type: ignore[call-arg]
    assert str(caught.value).startswith(f"{path}, line 1") and "\n" not in str(caught.value)


@pytest.mark.parametrize("row", [
    {"input_ids": [1, 2], "loss_mask": [0, 0]}, {"input_ids": [1, 2], "labels": [-100, -100]},
])  # fmt: skip
def test_rows_without_loss_say_so(row: dict[str, Any], tmp_path: Path) -> None:
    """Nothing was cut, so no other length would help."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"rows\.jsonl: no token of it carries loss; see that"):
        TokensReader(str(path)).make_dataset(make_template("base"))


@pytest.mark.parametrize("roles", [[], ["system"], ["assistant"], ["user", "system"]], ids=str)
def test_a_conversation_without_a_question_is_refused(roles: list[str], tmp_path: Path) -> None:
    """A reader that allows questions without answers still needs a question."""
    path = tmp_path / "rows.jsonl"
    path.write_text(
        json.dumps({"messages": [{"role": role, "content": "Hi"} for role in roles]}) + "\n"
    )
    reader = JsonlReader(str(path))
    reader.allows_unanswered = True
    with pytest.raises(UserError, match="line 1: it has no question to answer"):
        reader.load_conversations()


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    """The tokenizer says how many tokens there are."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 10**6], "loss_mask": [0, 1]}) + "\n")
    with pytest.raises(
        UserError, match="token id 1000000.*tokenize the data with the target's own tokenizer"
    ):
        TokensReader(str(path)).make_dataset(make_template("base"))


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a pipe in a folder"])
def test_what_may_never_end_is_not_read(tmp_path: Path, kind: str) -> None:
    """A pipe that nobody writes to would wait for ever, and a device never ends."""
    path = tmp_path / "rows.jsonl"
    if kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)
    source = tmp_path if kind == "a pipe in a folder" else path
    with pytest.raises(UserError, match=r"rows\.jsonl: this is no file"):
        JsonlReader(str(source)).load_conversations()


def test_a_line_longer_than_any_row_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file without a line's end would fill the memory."""
    monkeypatch.setattr(files, "MAX_LINE_LENGTH", 1000)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [USER, HELLO]}) + "\n" + "x" * 1000)
    with pytest.raises(UserError, match="line 2: it has 1000 characters or more"):
        JsonlReader(str(path)).load_conversations()


def test_a_training_on_malformed_data_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, one line on the error stream, no run folder."""
    path = tmp_path / "rows.jsonl"
    run = tmp_path / "run"
    path.write_text(
        json.dumps({"messages": [USER, HELLO]})
        + "\n"
        + json.dumps({"messages": [USER, result()]})
        + "\n"
    )
    words = [
        "train",
        "recipe=eagle3",
        "target=tiny",
        "data=jsonl",
        f"data.path={path}",
        f"run={run}",
    ]
    monkeypatch.setattr(sys, "argv", ["spectrain", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("spectrain:")]
    assert (
        stopped.value.code == 2
        and len(lines) == 1
        and "line 2: message 2: a tool's result answers no call" in lines[0]
    )
    assert not run.exists()
