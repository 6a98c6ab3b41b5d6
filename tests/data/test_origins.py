"""Refusals name file and line; text files may begin with a byte-order mark; padding of token
rows is no text.
"""

import codecs
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from spectrain.config.choices import check_files, load_yaml, read_header
from spectrain.config.plain_files import read_json, read_yaml
from spectrain.data.chat import tokenize_prompt
from spectrain.data.chat_template import ChatTemplate
from spectrain.data.mixture import MixReader
from spectrain.data.readers import ConversationReader, JsonlReader
from spectrain.data.stream import StreamReader
from spectrain.data.text import TextReader
from spectrain.data.tokens import TokensReader
from spectrain.errors import UserError
from spectrain.files import read_text
from spectrain.models.bundled import TINY_DIRECTORY
from spectrain.models.loading import apply_chat_template

REFUSING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% "
    "endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% "
    "endif %}"
)
CHAT = {
    "messages": [
        {"role": "user", "content": "Count to 3."},
        {"role": "assistant", "content": "One, two, three."},
    ]
}
SYSTEM = {"messages": [{"role": "system", "content": "Be brief."}, *CHAT["messages"]]}
CALL = {"function": {"name": "look", "arguments": {"at": "sky"}}}
TOOLS = {
    "messages": [CHAT["messages"][0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(TINY_DIRECTORY)
    loaded.chat_template = REFUSING
    return loaded


@pytest.fixture
def template(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    return ChatTemplate(tokenizer)


def write_rows(path: Path, *rows: Any) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


@pytest.mark.parametrize(
    "bad, words", [(SYSTEM, "refuses a conversation of system"), (TOOLS, "has tool calls")]
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet"])
def test_a_refused_conversation_is_named(
    name: str, bad: dict[str, Any], words: str, tmp_path: Path, template: ChatTemplate
) -> None:
    """By file and line, or row of a table, in training, in a mixture and where its answer is
    written.
    """
    path = tmp_path / name
    rows = [CHAT, CHAT, CHAT, bad, CHAT]
    if path.suffix == ".parquet":
        pq.write_table(
            pa.Table.from_pylist([{"messages": json.dumps(row["messages"])} for row in rows]), path
        )
    else:
        write_rows(path, *rows)
    where = f"{path}, {'row' if path.suffix == '.parquet' else 'line'} 4: "
    with pytest.raises(UserError) as raised:
        JsonlReader(str(path)).make_dataset(template)
    assert str(raised.value).startswith(where) and words in str(raised.value)
    mixture = MixReader([{"data": "embedded", "limit": 2}, {"data": "jsonl", "path": str(path)}])
    with pytest.raises(UserError) as raised:
        mixture.make_dataset(template)
    assert str(raised.value).startswith(f"data.sources[1]: {where}")
    conversation = JsonlReader(str(path)).load_conversations()[3]
    with pytest.raises(UserError) as raised:
        tokenize_prompt(template, conversation.up_to(len(conversation.messages) - (bad is SYSTEM)))
    assert str(raised.value).startswith(where)


def test_no_answer_is_named(tmp_path: Path, template: ChatTemplate) -> None:
    """A template that renders no answer is refused with the row and the beginning of its text
    alone.
    """
    silent = ChatTemplate(AutoTokenizer.from_pretrained(TINY_DIRECTORY))
    silent.tokenizer.chat_template = (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    long = {"messages": [{"role": "user", "content": "Why? " * 400}, CHAT["messages"][1]]}
    path = write_rows(tmp_path / "rows.jsonl", long)
    with pytest.raises(
        UserError, match="line 1: in this conversation no token is the assistant's"
    ) as raised:
        JsonlReader(path).make_dataset(silent)
    assert len(str(raised.value)) < 1000


def test_ids_beyond_the_vocabulary_are_named(tmp_path: Path, template: ChatTemplate) -> None:
    row = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    path = write_rows(tmp_path / "rows.jsonl", row, {**row, "input_ids": [5, 10**6, 7]})
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2: it holds the token id 1000000"):
        TokensReader(path).make_dataset(template)


def test_a_text_with_a_token_that_has_no_embedding_is_named(
    tmp_path: Path, template: ChatTemplate
) -> None:
    small = ChatTemplate(template.tokenizer, num_embeddings=10)
    path = write_rows(tmp_path / "rows.jsonl", CHAT)
    with pytest.raises(
        UserError, match=r"rows\.jsonl, line 1: a text holds .* embedding has 10 rows"
    ):
        JsonlReader(path).make_dataset(small)


def test_the_first_row_that_a_stream_leaves_out_is_numbered(
    tmp_path: Path, template: ChatTemplate
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", CHAT, CHAT, SYSTEM, CHAT)
    reader = StreamReader(path)
    assert reader.make_dataset(template).num_conversations == 3
    assert reader.first_skip_reason.startswith("row 3: the chat template refuses")


# Byte-order marks


@pytest.mark.parametrize("make", [JsonlReader, StreamReader])
def test_a_byte_order_mark_loses_no_row(
    make: Callable[[str], ConversationReader], tmp_path: Path
) -> None:
    """An editor on Windows writes one, and CRLF."""
    text = "".join(json.dumps(CHAT) + "\r\n" for _ in range(2))
    (tmp_path / "rows.jsonl").write_bytes(codecs.BOM_UTF8 + text.encode())
    assert len(make(str(tmp_path / "rows.jsonl")).load_conversations()) == 2
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(codecs.BOM_UTF8 + text.encode()))
    assert len(make(str(tmp_path / "rows.jsonl.gz")).load_conversations()) == 2


def test_a_byte_order_mark_is_no_text(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """In source files, settings, descriptions and templates."""
    for name, text in (
        ("a.py", "x = 1\n"),
        ("a.yaml", "x: 1\n"),
        ("a.json", '{"x": 1}'),
        ("a.jinja", "{{ messages[0].content }}"),
    ):
        (tmp_path / name).write_bytes(codecs.BOM_UTF8 + text.encode())
    (document,) = TextReader(str(tmp_path), suffixes=[".py"]).load_conversations()
    assert document.text == "x = 1\n" and document.origin.endswith("a.py")
    assert read_yaml(tmp_path / "a.yaml") == read_json(tmp_path / "a.json") == {"x": 1}
    own = AutoTokenizer.from_pretrained(TINY_DIRECTORY)
    apply_chat_template(own, str(tmp_path / "a.jinja"))
    assert own.chat_template.startswith("{{")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_other_encodings_are_refused_in_one_sentence(
    name: str, encoding: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(json.dumps([CHAT]).encode(encoding))
    with pytest.raises(
        UserError, match=rf"{name}: it is UTF-{encoding[-2:]} text; save it as UTF-8"
    ):
        JsonlReader(str(tmp_path / name)).load_conversations()
    with pytest.raises(UserError, match="save it as UTF-8"):
        read_text(tmp_path / name)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_an_encoding_without_a_mark_is_no_fault_of_the_json(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(json.dumps(CHAT).encode(encoding))
    with pytest.raises(
        UserError, match=r"rows.jsonl: it has zero bytes, as UTF-16 .* text has; save it as UTF-8"
    ):
        JsonlReader(str(tmp_path / "rows.jsonl")).load_conversations()


def test_settings_of_a_user_are_text(tmp_path: Path) -> None:
    """A yaml of --config-dir may begin with a byte-order mark; another encoding is named before
    hydra reads it.
    """
    (tmp_path / "target").mkdir()
    file = tmp_path / "target" / "mine.yaml"
    file.write_bytes(codecs.BOM_UTF8 + b"# Mine.\n_target_: a.b\n")
    check_files([tmp_path])
    assert read_header(file) == "Mine." and load_yaml(file) == {"_target_": "a.b"}
    for content, words in (
        ("x: 1\n".encode("utf-16"), "UTF-16 text"),
        (b"x: \xff\n", "it is no text"),
    ):
        file.write_bytes(content)
        with pytest.raises(UserError, match=f"mine.yaml: .*{words}"):
            check_files([tmp_path])


# Rows of tokens


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_removed(side: str, tmp_path: Path, template: ChatTemplate) -> None:
    """Whatever its labels are."""
    ids = [10, 11, 12, 13]
    labels = [-100, -100, 12, 13]
    padded = {
        "left": lambda values, fill: [fill, fill, *values],
        "right": lambda values, fill: [*values, fill, fill],
    }[side]
    row = {
        "input_ids": padded(ids, 0),
        "attention_mask": padded([1] * 4, 0),
        "labels": padded(labels, 0),
    }
    path = write_rows(
        tmp_path / "rows.jsonl",
        row,
        {**row, "attention_mask": [bool(value) for value in row["attention_mask"]]},
    )
    dataset = TokensReader(path).make_dataset(template)
    assert [example.tokens for example in dataset.examples] == [ids, ids]
    assert dataset.num_supervised == 4


@pytest.mark.parametrize(
    "columns, words",
    [
        ({"attention_mask": [1, 1, 1]}, "4 input_ids and 3 attention_mask"),
        ({"attention_mask": [1, 0, 1, 1]}, "is 0 within the text"),
        ({"attention_mask": [0, 0, 0, 0]}, "0 everywhere"),
        ({"attention_mask": [1, 1, 2, 2]}, "other values than 0 and 1"),
        ({"attention_mask": [[1], [1], [1], [1]]}, "no list of integers"),
        ({"position_ids": [0, 1, 0, 1]}, "position_ids do not count up by one"),
        ({"position_ids": [0, 1]}, "4 input_ids and 2 position_ids"),
    ],
)
def test_masks_and_positions_that_cannot_be_used(
    columns: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = write_rows(
        tmp_path / "rows.jsonl", {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1], **columns}
    )
    with pytest.raises(UserError, match=rf"rows\.jsonl, line 1: .*{words}"):
        TokensReader(path).load_conversations()
