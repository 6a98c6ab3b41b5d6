"""Conversations and prompts of Python, as files that every command reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import pytest

from spectrain.cli.rows import store_conversations, write_prompts
from spectrain.data.readers import JsonlReader
from spectrain.errors import UserError
from spectrain.eval.prompts import read_prompts

CHATS = [
    [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n}."}]
    for n in range(3)
]


def make_data(kind: str) -> Any:
    rows = [{"messages": chat} for chat in CHATS]
    return {"chats": CHATS, "rows": rows, "dataset": datasets.Dataset.from_list(rows)}[kind]


@pytest.mark.parametrize("kind", ["chats", "rows", "dataset"])
def test_conversations_come_back_and_have_one_file(kind: str, tmp_path: Path) -> None:
    path = store_conversations(make_data(kind), tmp_path)
    read = JsonlReader(path=str(path)).load_conversations()
    assert [conversation.messages for conversation in read] == CHATS
    assert store_conversations(CHATS, tmp_path) == path
    assert store_conversations(CHATS[:2], tmp_path) != path


def test_prompts_come_back(tmp_path: Path) -> None:
    """A text, a chat that ends with an answer, and a row."""
    given = ["What is a bee?", CHATS[0], {"prompt": "Name three.", "category": "list"}]
    prompts = read_prompts(str(write_prompts(given, tmp_path))).prompts
    assert [prompt.turns for prompt in prompts] == [
        ["What is a bee?"],
        ["What is 0?"],
        ["Name three."],
    ]
    assert prompts[2].category == "list"


@pytest.mark.parametrize(
    "data, sentence",
    [
        ([], "data: it holds no conversation"),
        (["a text"], r"data\[0\]: it holds no conversation; write"),
        (datasets.DatasetDict({"test": datasets.Dataset.from_list([])}), r"as in data\['test'\]"),
        (iter(CHATS), "has no length; give a list"),
        ([{"messages": CHATS[0], "image": {1}}], r"data\[0\]: JSON cannot hold it"),
    ],
)
def test_what_is_no_data_is_refused(data: Iterable[Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        store_conversations(data, tmp_path)
    assert json.dumps([path.name for path in tmp_path.iterdir()]) == "[]"
