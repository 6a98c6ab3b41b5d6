"""Readers: every layout gives the same conversations, and every bad line is named by file and
line.
"""

import gzip
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest

from spectrain.data.messages import Conversation, parse_conversation
from spectrain.data.readers import (
    EmbeddedReader,
    HubReader,
    JsonlReader,
    iterate_elements,
    iterate_json_array,
)
from spectrain.data.text import TextReader
from spectrain.errors import UserError

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello caf\u00e9!"},
]
GOOD = json.dumps({"messages": MESSAGES})
NAMES = {"system": "system", "user": "human", "assistant": "gpt"}
SHAREGPT = [{"from": NAMES[turn["role"]], "value": turn["content"]} for turn in MESSAGES]


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "row", [{"messages": MESSAGES}, {"conversations": SHAREGPT}], ids=["messages", "conversations"]
)
@pytest.mark.parametrize("name", ["chats.jsonl", "chats.jsonl.gz"])
def test_both_layouts_read_the_same(tmp_path: Path, row: dict[str, Any], name: str) -> None:
    """OpenAI's and ShareGPT's layout, plain or compressed, give one form; blank lines are
    skipped.
    """
    opener = gzip.open if name.endswith(".gz") else open
    with opener(tmp_path / name, "wt", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n\n" + json.dumps(row, ensure_ascii=False) + "\n")
    assert JsonlReader(str(tmp_path / name)).load_conversations() == [
        Conversation(MESSAGES),
        Conversation(MESSAGES),
    ]


def test_a_directory_or_a_pattern_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    """Every .jsonl and .jsonl.gz of a folder is read and nothing else there, or those that a
    pattern names.
    """
    texts = {"b.jsonl": "two", "a.jsonl.gz": "one", "c.jsonl": "three", "notes.txt": "no"}
    for name, text in texts.items():
        opener = gzip.open if name.endswith(".gz") else open
        with opener(tmp_path / name, "wt", encoding="utf-8") as file:
            turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]
            file.write(json.dumps({"messages": turns}) + "\n")
    (tmp_path / "failed").mkdir()
    (tmp_path / "failed" / "a.jsonl").write_text("no JSON")

    def read_questions(path: Path) -> list[str]:
        return [chat.messages[0]["content"] for chat in JsonlReader(str(path)).load_conversations()]

    assert read_questions(tmp_path) == ["one", "two", "three"]
    assert read_questions(tmp_path / "[bc].jsonl") == ["two", "three"]
    (tmp_path / "c.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"c\.jsonl, line 1:"):
        read_questions(tmp_path)
    with pytest.raises(UserError, match="there is no such file"):
        read_questions(tmp_path / "failed" / "*.gz")


@pytest.mark.parametrize(
    "system",
    [[], [{"role": "system", "content": "Be brief."}]],
    ids=["without system", "with system"],
)
def test_answers_before_the_first_question_are_dropped(system: list[dict[str, str]]) -> None:
    """An opening greeting of the assistant goes, a system turn stays."""
    greeting = {"role": "assistant", "content": "Welcome!"}
    assert parse_conversation(
        {"messages": [*system, greeting, *MESSAGES[1:]]}, "here"
    ).messages == [*system, *MESSAGES[1:]]


BAD = {
    "not JSON": "{messages: 3",
    "not an object": "[1, 2]",
    "no conversation": '{"text": "Hi"}',
    "no assistant turn": '{"messages": [{"role": "user", "content": "Hi"}]}',
    "only a greeting": '{"messages": [{"role": "assistant", "content": "Hi"}]}',
    "no turns": '{"messages": []}',
    "unknown role": (
        '{"messages": [{"role": "usr", "content": "Hi"}, {"role": "assistant", "content": '
        '"Hello"}]}'
    ),
    "role of a wrong type": (
        '{"messages": [{"role": ["user"], "content": "Hi"}, {"role": "assistant", "content": '
        '"Hello"}]}'
    ),
    "content of a wrong type": (
        '{"messages": [{"role": "user", "content": 3}, {"role": "assistant", "content": "Hello"}]}'
    ),
    "turn of a wrong type": '{"messages": ["Hi", "Hello"]}',
    "nested without end": '{"messages": ' + "[" * 100_000,
    "a number of 5,000 digits": '{"messages": ' + "1" * 5_000 + "}",
}


@pytest.mark.parametrize("line", BAD.values(), ids=list(BAD))
def test_bad_line_is_named_by_file_and_number(tmp_path: Path, line: str) -> None:
    """The third line is at fault, and the message says so."""
    path = write_lines(tmp_path / "chats.jsonl", GOOD, "", line, GOOD)
    with pytest.raises(UserError) as caught:
        JsonlReader(str(path)).load_conversations()
    assert f"{path}, line 3:" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key, line", [
    ("messages", '{"messages": [], "messages": [{"role": "user", "content": "Hi"}]}'),
    ("content", '{"messages": [{"role": "user", "content": "Hi", "content": "Ho"}]}'),
])  # fmt: skip
def test_a_key_that_is_given_twice_is_named(tmp_path: Path, key: str, line: str) -> None:
    """No reader can tell which of the two values was meant."""
    (tmp_path / "chats.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=f"line 1: the key '{key}' is given twice"):
        JsonlReader(str(tmp_path / "chats.jsonl")).load_conversations()


def test_a_json_list_is_read_and_named_in_json_lines(tmp_path: Path) -> None:
    """A .json file may hold a list of conversations, as ShareGPT's do; a line of a .jsonl file
    may not.
    """
    path = write_lines(tmp_path / "chats.json", f"[{GOOD}, {GOOD}]")
    assert JsonlReader(str(path)).load_conversations() == [Conversation(MESSAGES)] * 2
    path = write_lines(tmp_path / "chats.jsonl", f"[{GOOD}, {GOOD}]")
    with pytest.raises(UserError, match=r"line 1: it is a list; write one conversation a line"):
        JsonlReader(str(path)).load_conversations()


SINGLE_TURNS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "Alpaca": ({"instruction": "Add.", "input": "1 2", "output": "3"}, ["Add.\n\n1 2", "3"]),
    "Alpaca without input": ({"instruction": "Hi", "input": "", "output": "Ho"}, ["Hi", "Ho"]),
    "completion": ({"prompt": "Hi", "completion": "Ho"}, ["Hi", "Ho"]),
    "response": ({"prompt": "Hi", "response": "Ho"}, ["Hi", "Ho"]),
    "question": ({"question": "Hi", "answer": "Ho"}, ["Hi", "Ho"]),
    "system": ({"system": "Be kind.", "question": "Hi", "answer": "Ho"}, ["Be kind.", "Hi", "Ho"]),
}


@pytest.mark.parametrize("case", SINGLE_TURNS)
def test_a_row_may_have_its_question_and_answer_in_columns(case: str) -> None:
    row, texts = SINGLE_TURNS[case]
    unread: Counter[str] = Counter()
    conversation = parse_conversation({**row, "score": 1}, "here", unread=unread)
    roles = ["system", "user", "assistant"][-len(texts) :]
    assert [(m["role"], m["content"]) for m in conversation.messages] == list(zip(roles, texts))
    assert unread == {"key 'score' of a row": 1}


def test_a_question_without_an_answer_names_the_forms() -> None:
    with pytest.raises(UserError, match="or one question and its answer as instruction and output"):
        parse_conversation({"instruction": "Hi"}, "here")


def test_the_line_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(f"{GOOD}\n{GOOD}\n".encode() + b'{"messages": "caf\xe9"}\n')
    with pytest.raises(UserError, match="chats.jsonl, line 3: it is no text"):
        JsonlReader(str(path)).load_conversations()


@pytest.mark.parametrize("role", ["usr", "critic"])
def test_unknown_role_is_quoted(role: str) -> None:
    """The wrong role stands in the message beside the right ones."""
    with pytest.raises(UserError, match=rf"{role}.*use system, developer, user, assistant or tool"):
        parse_conversation({"messages": [{"role": role, "content": "Hi"}]}, "here")


@pytest.mark.parametrize("content", [b"", b"\n \n", None], ids=["empty", "blank", "missing"])
def test_file_without_conversations_is_named(tmp_path: Path, content: bytes | None) -> None:
    """An empty file and a missing one stop, by name."""
    path = tmp_path / "chats.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        JsonlReader(str(path)).load_conversations()
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.jsonl", b'{"messages": "\xff\xfe"}\n'),
        ("a.jsonl.gz", b"not compressed"),
        ("b.jsonl.gz", gzip.compress(GOOD.encode())[:10] + b"\xff" * 20),
    ],
    ids=["encoding", "format", "compression"],
)
def test_unreadable_bytes_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    """A file in another encoding, or not compressed as its name says, is the user's to mend."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        JsonlReader(str(tmp_path / name)).load_conversations()
    assert name in str(caught.value)


def test_limit_takes_a_prefix(tmp_path: Path) -> None:
    """`limit` conversations are read and no line after them is looked at."""
    path = write_lines(tmp_path / "chats.jsonl", GOOD, GOOD, "not JSON")
    assert len(JsonlReader(str(path), limit=2).load_conversations()) == 2


@pytest.mark.parametrize("setting", [{"limit": 0}, {"max_length": 7}])
def test_settings_out_of_range_are_refused(setting: dict[str, int]) -> None:
    """The message is the setting as the user wrote it."""
    key, value = next(iter(setting.items()))
    with pytest.raises(UserError, match=f"data.{key}={value}"):
        EmbeddedReader(**setting)


def test_embedded_conversations_are_well_formed_and_ordered() -> None:
    """Every embedded conversation passes the reader's own check, and a limit gives a prefix of
    them.
    """
    conversations = EmbeddedReader().load_conversations()
    assert [
        parse_conversation({"messages": chat.messages}, "embedded") for chat in conversations
    ] == conversations
    assert EmbeddedReader(limit=5).load_conversations() == conversations[:5]


class SlowFile(io.StringIO):
    """A file that gives at most `size` characters a read."""

    def __init__(self, text: str, size: int) -> None:
        super().__init__(text)
        self.size = size

    def read(self, _: int | None = -1) -> str:
        return super().read(self.size)


ELEMENTS = [
    {"id": "a", "x": [1, 2.5, "]},{"]},
    {"text": 'quote \\" and \u00e9\n'},
    [],
    "word, comma",
    {"deep": {"er": None}},
]


@pytest.mark.parametrize("indent", [None, 2], ids=["one line", "indented"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_stream_array_equals_json(size: int, indent: int | None) -> None:
    """Whatever the chunks, the elements are those of json.loads; escaped quotes and brackets in
    strings included.
    """
    text = SlowFile("\n" + json.dumps(ELEMENTS, indent=indent) + "\n", size)
    assert list(iterate_elements(text)) == ELEMENTS


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("cut", ["in a string", "after a comma", "in an escape", "at the end"])
def test_stream_array_stops_where_the_file_breaks_off(cut: str, size: int) -> None:
    """The elements before the break are all given, the broken one is not."""
    text = json.dumps(ELEMENTS[:3])[:-1]
    tail = {
        "in a string": ', {"text": "and th',
        "after a comma": ", ",
        "in an escape": ', {"t": "\\',
        "at the end": "",
    }
    trickle = SlowFile(text + tail[cut], size)
    assert list(iterate_elements(trickle)) == ELEMENTS[:3]


def test_stream_array_reads_files(tmp_path: Path) -> None:
    """In a real file longer than one chunk, the element on the chunk's border is complete."""
    elements = [{"n": n, "text": "x" * 50_000} for n in range(100)]
    (tmp_path / "array.json").write_text(json.dumps(elements)[:-20_000])
    assert list(iterate_json_array(tmp_path / "array.json")) == elements[:99]


@pytest.mark.parametrize(
    "row", [{"messages": MESSAGES}, {"conversations": SHAREGPT}], ids=["messages", "conversations"]
)
def test_hub_reads_a_saved_data_set(tmp_path: Path, row: dict[str, Any]) -> None:
    """A directory that `datasets` saved gives the same conversations as JSON Lines."""
    datasets.Dataset.from_list([row, row]).save_to_disk(tmp_path / "saved")
    assert HubReader(str(tmp_path / "saved")).load_conversations() == [
        Conversation(MESSAGES),
        Conversation(MESSAGES),
    ]


def test_hub_takes_the_split_of_a_saved_dictionary(tmp_path: Path) -> None:
    """A saved DatasetDict gives the split that was asked for."""
    other = [{"role": "user", "content": "Bye"}, {"role": "assistant", "content": "See you"}]
    splits = {"train": [{"messages": MESSAGES}], "test": [{"messages": other}]}
    saved = datasets.DatasetDict(
        {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    )
    saved.save_to_disk(tmp_path / "saved")
    assert HubReader(str(tmp_path / "saved"), split="test").load_conversations() == [
        Conversation(other)
    ]


def test_hub_names_the_bad_row(tmp_path: Path) -> None:
    """A row without an answer is named by data set and number."""
    rows = [{"messages": MESSAGES[1:]}, {"messages": MESSAGES[1:2]}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match=r"saved, row 1: .*no assistant turn"):
        HubReader(str(tmp_path / "saved")).load_conversations()


def test_hub_names_what_it_cannot_load(tmp_path: Path) -> None:
    """A directory that is no data set stops in one sentence."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"^data\.path=.*empty") as caught:
        HubReader(str(tmp_path / "empty")).load_conversations()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": None, "conversations": SHAREGPT},
        {"messages": [{"role": None, "content": None, **turn} for turn in SHAREGPT]},
    ],
    ids=["messages", "role"],
)
def test_null_columns_hide_no_other(row: dict[str, Any]) -> None:
    """Tables fill gaps with null."""
    assert parse_conversation(row, "here") == Conversation(MESSAGES)


def test_a_null_conversation_hides_no_prompt() -> None:
    row = {"messages": None, "turns": None, "prompt": "Hi"}
    assert parse_conversation(row, "here", allows_unanswered=True).messages[0] == MESSAGES[1]


def test_what_a_limit_leaves_out_is_said(tmp_path: Path) -> None:
    """The line counts the rows of files; where nothing is left out there is none."""
    path = str(write_lines(tmp_path / "own.jsonl", *[GOOD] * 5, ""))
    line = f"{path}: 3 of 5 conversations (data.limit=3; data.limit=null takes all)"
    assert JsonlReader(path, limit=3).limit_lines() == [line]
    for limit in (5, 9, None):
        assert not JsonlReader(path, limit=limit).limit_lines()
    assert (
        "320 of 2201 conversations (data.limit=320;" in EmbeddedReader(limit=320).limit_lines()[0]
    )
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "texts" / name).write_text("Some text.")
    assert (
        "the first 1 conversations (data.limit=1;"
        in TextReader(str(tmp_path / "texts"), limit=1).limit_lines()[0]
    )
