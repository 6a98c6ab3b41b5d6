"""Parquet and Arrow files that lie about their rows, and those that name other files."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spectrain.data.readers import ConversationReader, HubReader, JsonlReader
from spectrain.data.stream import StreamReader
from spectrain.errors import UserError

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
MEDIA = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
TEXT = {"dtype": "string", "_type": "Value"}
CHAT_FEATURE = {"_type": "List", "feature": {"role": TEXT, "content": TEXT}}


def make_table(num_rows: int) -> pa.Table:
    return pa.table({"messages": [CHAT] * num_rows, "number": list(range(num_rows))})


def with_media(kind: str, nesting: str, path: str) -> pa.Table:
    """Return one row with a column of media whose value is a path of another file."""
    value: Any = {"bytes": None, "path": path}
    feature: Any = {"_type": kind}
    form = MEDIA
    if nesting != "plain":
        value, feature, form = [value], {"_type": "List", "feature": feature}, pa.list_(form)
    if nesting == "struct":
        value, feature, form = {"a": value}, {"a": feature}, pa.struct([("a", form)])
    table = pa.table({"messages": [CHAT], "media": pa.array([value], type=form)})
    features = {"messages": CHAT_FEATURE, "media": feature}
    return table.replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )


def write_table(path: Path, table: pa.Table) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(str(path), table.schema) as file:
            file.write_table(table)
    else:
        datasets.Dataset(table).save_to_disk(path)
    return path


def read_stream(path: str) -> list[Any]:
    tables = StreamReader(path=path).iterate_tables(4)
    return [row["messages"] for table in tables for row in table.to_pylist()]


def read_all(make: Callable[[str], ConversationReader]) -> Callable[[str], list[Any]]:
    return lambda path: [row.messages for row in make(path).load_conversations()]


READERS = {
    "jsonl parquet": ("rows.parquet", read_all(JsonlReader)),
    "jsonl arrow": ("rows.arrow", read_all(JsonlReader)),
    "jsonl saved": ("saved", read_all(JsonlReader)),
    "hub saved": ("saved", read_all(HubReader)),
    "stream parquet": ("rows.parquet", read_stream),
    "stream saved": ("saved", read_stream),
}


@pytest.mark.parametrize(("name", "read"), READERS.values(), ids=READERS.keys())
@pytest.mark.parametrize(
    ("kind", "nesting"),
    [("Image", "plain"), ("Image", "list"), ("Image", "struct"), ("Audio", "plain")],
)
def test_no_row_opens_a_picture_or_an_address(
    kind: str,
    nesting: str,
    name: str,
    read: Callable[[str], list[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The columns that a file calls media stay as they are: `datasets` would open the path, or
    fetch it where it is an address.
    """
    opened: list[Any] = []
    monkeypatch.setattr(PIL.Image, "open", lambda *args: opened.append(args))
    other = tmp_path / "other"
    other.write_text("secret")
    path = write_table(tmp_path / name, with_media(kind, nesting, str(other)))
    assert read(str(path)) == [CHAT]
    assert opened == []


def encode_varint(number: int) -> bytes:
    assert number < 64
    return bytes([2 * number])


@pytest.mark.parametrize("read", [read_all(JsonlReader), read_stream], ids=["jsonl", "stream"])
def test_row_counts_that_contradict_each_other_are_refused(
    read: Callable[[str], list[Any]], tmp_path: Path
) -> None:
    """Each byte in the footer that holds the number of rows, changed alone: either the rows are
    all read, or the file is refused; none is left out in silence.
    """
    path = write_table(tmp_path / "rows.parquet", make_table(12))
    content = path.read_bytes()
    (size,) = struct.unpack("<I", content[-8:-4])
    refused = 0
    for offset in range(len(content) - 8 - size, len(content) - 8):
        if content[offset : offset + 1] != encode_varint(12):
            continue
        for number in (1, 50):
            path.write_bytes(content[:offset] + encode_varint(number) + content[offset + 1 :])
            try:
                assert read(str(path)) == [CHAT] * 12
            except UserError as error:
                refused += "it is damaged: " in str(error)
    # Of the file and of its group of rows, each too few and too many, and the values of `number`.
    assert refused == 6


@pytest.mark.parametrize("read", [read_all(JsonlReader), read_stream], ids=["jsonl", "stream"])
def test_an_empty_group_of_rows_is_skipped(
    read: Callable[[str], list[Any]], tmp_path: Path
) -> None:
    table = make_table(3)
    with pq.ParquetWriter(tmp_path / "rows.parquet", table.schema) as file:
        for part in (table.slice(0, 0), table.slice(0, 2), table.slice(0, 0), table.slice(2)):
            file.write_table(part)
    assert read(str(tmp_path / "rows.parquet")) == [CHAT] * 3


def test_a_file_without_rows_says_so(tmp_path: Path) -> None:
    path = write_table(tmp_path / "rows.parquet", make_table(0))
    with pytest.raises(UserError, match="it holds no conversation; give a file with at least one"):
        JsonlReader(str(path)).load_conversations()


def test_a_saved_folder_that_ends_early_is_one_sentence(tmp_path: Path) -> None:
    path = write_table(tmp_path / "saved", make_table(12))
    (file,) = path.glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(UserError, match=r"^data\.path=.*saved: "):
        HubReader(str(path)).load_conversations()
