"""Plain text and prepared tokens as data: documents, completions, fill-in-the-middle, files of
any format.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import AddedToken

from spectrain.data.chat_template import ChatTemplate
from spectrain.data.messages import Conversation
from spectrain.data.readers import HubReader, JsonlReader
from spectrain.data.stream import StreamReader
from spectrain.data.text import TextReader
from spectrain.data.tokens import TokensReader
from spectrain.errors import UserError
from tests.data.chat_templates import base_tokenizer, make_template
from tests.data.rows import write_lines

TEXTS = ["The sea is calm today.", "A ship leaves the harbour. " * 20]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]


def test_a_document_carries_loss_everywhere_and_long_ones_are_split(tmp_path: Path) -> None:
    """Every token but the first is learnt; a text beyond max_length becomes several sequences
    and loses nothing.
    """
    path = write_lines(tmp_path / "texts.jsonl", *({"text": text} for text in TEXTS))
    dataset = TextReader(path, max_length=32).make_dataset(make_template("base"))
    tokenizer = base_tokenizer()
    short, *parts = dataset.examples
    assert tokenizer.decode(short.tokens) == TEXTS[0] + str(tokenizer.eos_token)
    assert short.mask == [False] + [True] * (len(short.tokens) - 1)
    assert len(parts) > 2 and all(len(part.tokens) <= 32 for part in parts)
    assert tokenizer.decode([token for part in parts for token in part.tokens]).startswith(TEXTS[1])
    assert dataset.num_cut == dataset.num_dropped == 0


def test_a_completion_carries_loss_and_its_prompt_does_not(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "pairs.jsonl", {"prompt": "One, two,", "completion": " three."})
    (example,) = TextReader(path).make_dataset(make_template("base")).examples
    learnt = [token for token, counts in zip(example.tokens, example.mask) if counts]
    assert base_tokenizer().decode(learnt) == " three." + str(base_tokenizer().eos_token)


def test_a_folder_of_sources_is_read(tmp_path: Path) -> None:
    """Files are read by their endings; hidden files and files without text are left out and
    counted.
    """
    (tmp_path / "src" / ".git").mkdir(parents=True)
    (tmp_path / "src" / "a.py").write_text("print('a')\n")
    (tmp_path / "src" / "b.md").write_text("# B\n")
    (tmp_path / "src" / "c.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "src" / ".git" / "d.py").write_text("hidden\n")
    reader = TextReader(str(tmp_path / "src"), suffixes=[".py"])
    assert reader.load_conversations() == [Conversation([], text="print('a')\n")]
    assert reader.unread == {"file that is no UTF-8 text": 1}
    assert len(TextReader(str(tmp_path / "src")).load_conversations()) == 2


def test_fill_in_the_middle_has_the_tokenizers_own_tokens(tmp_path: Path) -> None:
    """Prefix, suffix and middle together are the document; the middle and the end carry loss."""
    tokenizer = copy.deepcopy(base_tokenizer())
    names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(name, special=True) for name in names]}
    )
    path = write_lines(tmp_path / "texts.jsonl", {"text": TEXTS[1]})
    (example,) = TextReader(path, infill=1.0).make_dataset(ChatTemplate(tokenizer)).examples
    text = tokenizer.decode(example.tokens)
    prefix, _, rest = text.removeprefix(names[0]).partition(names[1])
    suffix, _, middle = rest.partition(names[2])
    end = str(tokenizer.eos_token)
    assert text.startswith(names[0]) and prefix + middle.removesuffix(end) + suffix == TEXTS[1]
    learnt = [token for token, counts in zip(example.tokens, example.mask) if counts]
    assert tokenizer.decode(learnt) == middle
    with pytest.raises(UserError, match=r"data\.infill: the target's tokenizer has no tokens"):
        TextReader(path, infill=1.0).make_dataset(make_template("base"))


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet", "arrow", "saved"])
@pytest.mark.parametrize("key", ["loss_mask", "labels", "assistant_masks"])
def test_tokens_of_any_format_and_mask(form: str, key: str, tmp_path: Path) -> None:
    """Each kind of file and each kind of mask gives the same sequence."""
    row = {"input_ids": [5, 6, 7, 8], key: [-100, -100, 7, 8] if key == "labels" else [0, 0, 1, 1]}
    rows = datasets.Dataset.from_list([row, row])
    path = tmp_path / f"rows.{form}"
    if form == "jsonl":
        write_lines(path, row, row)
    elif form == "json":
        path.write_text(json.dumps([row, row]))
    elif form == "parquet":
        rows.to_parquet(path)
    else:
        rows.save_to_disk(path if form == "saved" else tmp_path / "saved")
        if form == "arrow":
            next((tmp_path / "saved").glob("*.arrow")).rename(path)
    dataset = TokensReader(str(path)).make_dataset(make_template("base"))
    assert [(example.tokens, example.mask) for example in dataset.examples] == [
        ([5, 6, 7, 8], [False, False, True, True])
    ] * 2


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_conversations_of_tables(form: str, tmp_path: Path) -> None:
    """data=jsonl reads tables too; a column of JSON text stands for a list."""
    rows = datasets.Dataset.from_list(
        [{"messages": CHAT if form == "parquet" else json.dumps(CHAT)}]
    )
    path = tmp_path / f"chats.{form}"
    rows.to_csv(path) if form == "csv" else rows.to_parquet(path)
    assert JsonlReader(str(path)).load_conversations() == [Conversation(CHAT)]


def with_call(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}]


PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, CHAT[1]]
MIXED: dict[str, list[list[dict[str, Any]]]] = {
    "texts and parts": [CHAT, PARTS],
    "calls of several functions": [with_call("a", {"x": 1}), with_call("b", {"y": "z"})],
    "no calls and calls": [CHAT, with_call("a", {"x": [1, "y"]})],
    "ids of several types": [CHAT, with_call("a", {"x": {"y": None}})],
}


@pytest.mark.parametrize("reader", [JsonlReader, HubReader, StreamReader])
@pytest.mark.parametrize("rows", MIXED.values(), ids=MIXED.keys())
def test_rows_of_several_types_are_what_the_file_says(
    rows: list[list[dict[str, Any]]], reader: Any, tmp_path: Path
) -> None:
    """A text stays a text where another row has a list or an object in its place."""
    listed = [{"messages": messages, "id": number or "0"} for number, messages in enumerate(rows)]
    expected = JsonlReader(write_lines(tmp_path / "rows.jsonl", *listed)).load_conversations()
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "rows.json").write_text(json.dumps(listed))
    read = reader(str(tmp_path / "set")).load_conversations()
    assert [row.messages for row in read] == [row.messages for row in expected]


JSON_ROWS = {
    "a list": f"[{json.dumps({'text': 'a'})}, {json.dumps({'text': 'b'})}]",
    "a list with a mark": "\ufeff[\r\n" + '{"text": "a"},\r\n{"text": "b"}\r\n]\r\n',
    "one row after another": '{"text": "a"}\n{"text": "b"}\n',
    "rows on several lines": '{\n"text": "a"\n}\n{"text":\n"b"}',
}


@pytest.mark.parametrize("content", JSON_ROWS.values(), ids=JSON_ROWS.keys())
def test_forms_of_json_files(content: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(content, newline="")
    assert [row.text for row in TextReader(str(path)).load_conversations()] == ["a", "b"]


CSV_ROWS = {
    "numbers": ("text\n007\n1.50\n", ["007", "1.50"]),
    "words of libraries": ("text\nNA\nnull\nNone\nTrue\n", ["NA", "null", "None", "True"]),
    "quotes": ('text,id\r\n"a ""b"", c",1\r\n"d\r\ne",2\r\n', ['a "b", c', "d\r\ne"]),
    "a mark": ("\ufefftext\na\n", ["a"]),
}


@pytest.mark.parametrize(("content", "texts"), CSV_ROWS.values(), ids=CSV_ROWS.keys())
def test_cells_of_csv_are_texts(content: str, texts: list[str], tmp_path: Path) -> None:
    """A cell is no number or truth value, and is missing only where it is empty."""
    path = tmp_path / "rows.csv"
    path.write_text(content, newline="")
    assert [row.text for row in TextReader(str(path)).load_conversations()] == texts


BROKEN = {
    "rows.csv": {
        "text,id\na,1\nb,2,3\n": "line 3: it has 3 cells, and the first line names 2 columns",
        "text,text\na,b\n": "line 1: two columns are called 'text'",
        'text\na\n"b\n': "line 3: it is not CSV",
    },
    "rows.json": {
        '[{"text": "a"}, {"text": "b"': "row 2: it is not JSON",
        '[{"text": "a"}, ]': "row 2: it is not JSON",
        '[{"text": "a"}': "after row 1: it is not JSON (its list does not end)",
        '[{"text": "a"}] x': "after row 1: it is not JSON (there is more text behind its list)",
        '[{"text": "a"}, {"text": "b", "text": "c"}]': "row 2: the key 'text' is given twice",
    },
    "rows.txt": {"Some words.\n": "it holds no rows, by its name and by its beginning"},
}


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [(name, *case) for name, cases in BROKEN.items() for case in cases.items()],
)
def test_broken_files_of_text_are_a_single_sentence(
    name: str, content: str, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match=re.escape(sentence)) as caught:
        TextReader(str(path)).load_conversations()
    assert str(caught.value).startswith(str(path))


def test_what_a_folder_holds_besides_rows_is_counted(tmp_path: Path) -> None:
    """Nothing is left out without a word: other endings, folders within it, files without rows."""
    write_lines(tmp_path / "a.jsonl", {"messages": CHAT})
    write_lines(tmp_path / "B.JSONL", {"messages": CHAT})
    (tmp_path / "c.jsonl").touch()
    (tmp_path / "d.jsonl.zst").touch()
    (tmp_path / "e.json.gz").touch()
    (tmp_path / "more").mkdir()
    reader = JsonlReader(str(tmp_path))
    assert len(reader.load_conversations()) == 2
    assert reader.unread == {
        "file without a usable row": 1,
        "file that ends in '.zst' in data.path": 1,
        "file that ends in '.gz' in data.path": 1,
        "folder within data.path": 1,
    }


def test_of_keys_that_mean_the_same_one_is_read_and_the_others_are_counted(tmp_path: Path) -> None:
    turns = [{**CHAT[0], "from": "gpt", "value": "Ho"}, CHAT[1]]
    row = {"messages": turns, "conversations": [], "tools": [], "functions": []}
    reader = JsonlReader(write_lines(tmp_path / "rows.jsonl", row))
    (read,) = reader.load_conversations()
    assert read.messages == CHAT
    assert reader.unread == {
        "key 'from' of a message": 1,
        "key 'value' of a message": 1,
        "key 'conversations' of a row": 1,
        "key 'functions' of a row": 1,
    }


def test_a_stream_holds_conversations_texts_and_tokens(tmp_path: Path) -> None:
    """Each row is read as what it is."""
    rows = [
        {"messages": CHAT},
        {"text": TEXTS[0]},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
    ]
    path = write_lines(tmp_path / "mixed.jsonl", *rows)
    template = make_template("qwen3")
    dataset = StreamReader(path, held_out=0.0).make_dataset(template)
    assert len(dataset.examples) == 3 and dataset.examples[2].tokens == [5, 6, 7]
