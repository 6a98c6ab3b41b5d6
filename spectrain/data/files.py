"""Rows of data files, in any format that `datasets` reads. JSON Lines are read here, so that an
error names its line.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from spectrain.errors import UserError, describe_json_error, first_line
from spectrain.files import check_encoding, iterate_lines, open_text, require_regular_file

from .shards import MANIFEST, ShardSet

if TYPE_CHECKING:
    import datasets

LINE_SUFFIXES = (".jsonl", ".jsonl.gz")
PARQUET_BATCH_SIZE = 256
"""Rows of a Parquet file that are read at once."""
TABLE_FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".json": "json", ".csv": "csv"}
"""The name that `datasets` has for each format, by the suffix of a file."""


TEXT_FORMATS = ("json", "csv")


@dataclass(frozen=True)
class FileRow:
    """A row of a file, and where it stands."""

    content: Any
    location: str
    folder: Path


def list_files(source: str) -> list[Path]:
    """Return the data files that a path, a directory or a pattern names, in the order of their
    names.

    A directory of regenerated conversations is read if all of its shards are complete and
    unchanged.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if (path / MANIFEST).is_file():
        return ShardSet(path).complete_files()
    pattern = str(path / "*") if path.is_dir() else str(path)
    suffixes = (*LINE_SUFFIXES, *TABLE_FORMATS)
    files = [
        Path(name) for name in sorted(glob(pattern, recursive=True)) if name.endswith(suffixes)
    ]
    if not files:
        problem = "the folder holds no data file" if path.is_dir() else "there is no such file"
        raise UserError(
            f"data.path={source}: {problem}; give a file that ends in {', '.join(suffixes)}"
        )
    return files


def raise_error(error: UserError) -> None:
    """Raise the error of a row."""
    raise error


def read_rows(
    source: str, on_error: Callable[[UserError], None] = raise_error
) -> Iterator[FileRow]:
    """Yield the rows of all files that a path, a directory or a pattern names; `on_error` takes
    those that are no JSON.
    """
    folder = Path(source).expanduser()
    if (folder / "dataset_info.json").is_file():
        yield from _number_rows(folder, lambda: load_saved_rows(str(folder)))
        return
    for path in list_files(source):
        yield from read_file(path, on_error)


def read_file(path: Path, on_error: Callable[[UserError], None] = raise_error) -> Iterator[FileRow]:
    """Yield the rows of one file; `on_error` takes the error of a line that is no JSON."""
    require_regular_file(path, "give a file of rows")
    if path.suffix in TABLE_FORMATS:
        form = TABLE_FORMATS[path.suffix]
        if form in TEXT_FORMATS:
            with path.open("rb") as file:
                check_encoding(file.read(4), path)
        yield from _number_rows(path, lambda: open_table_files(form, [str(path)]))
        return
    number = 0
    try:
        with open_text(path, is_compressed=path.suffix == ".gz") as lines:
            for number, line in enumerate(iterate_lines(lines, path), 1):
                if not line.strip():
                    continue
                location = f"{path}, line {number}"
                try:
                    row = FileRow(parse_line(line, location), location, path.parent)
                except UserError as error:
                    on_error(error)
                    continue
                yield row
    except UnicodeDecodeError as error:
        location = f"{path}, line {find_line_of_no_text(path)}"
        raise UserError(
            f"{location}: it is no text ({error.reason}); save it as UTF-8 text"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{path}, after line {number}: it cannot be read ({first_line(error)}); see that it "
            "is complete and yours"
        ) from error


def open_bytes(path: Path) -> BinaryIO:
    """Open a file of rows to read its bytes, unpacked where its name ends in .gz."""
    require_regular_file(path)
    return cast(BinaryIO, gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb"))


def count_lines(path: Path) -> int:
    """Count the lines of a file of rows that are not blank."""
    with open_bytes(path) as lines:
        return sum(bool(line.strip()) for line in iterate_lines(lines, path))


def find_line_of_no_text(path: Path) -> int:
    """Return the number of the first line of a file that is not UTF-8. A file of text is decoded
    ahead of the line that is read, so the error of reading does not tell.
    """
    with open_bytes(path) as lines:
        for number, line in enumerate(iterate_lines(lines, path), 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    raise ValueError(f"{path}: every line is UTF-8")


def parse_line(line: str, location: str) -> Any:
    """Parse a line of JSON; a file that another library opened may begin with a byte-order mark."""
    try:
        return json.loads(line.removeprefix("\ufeff"), object_pairs_hook=_make_object)
    except RepeatedKey as error:
        raise UserError(
            f"{location}: the key {error} is given twice, so one of its values would be lost; "
            "write each key once"
        ) from error
    except RecursionError as error:
        raise UserError(
            f"{location}: its values are nested too deeply; write one object a line"
        ) from error
    # Numbers of thousands of digits are refused by the integer type.
    except ValueError as error:
        raise UserError(
            f"{location}: it is not JSON ({describe_json_error(error)}); write one object a line"
        ) from error


class RepeatedKey(ValueError):
    """A key that a JSON object has twice; the message is the key."""


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise `RepeatedKey` where it has a key twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedKey(repr(next(name for name in names if names.count(name) > 1)[:40]))
    return made


def open_table_files(form: str, files: list[str]) -> datasets.IterableDataset:
    """Open files of one format of `datasets` to read their rows in order; raise UserError for a
    Parquet file that counts its rows in two ways.
    """
    import datasets

    # datasets would take the size of the first group of rows, which may have none.
    options = {"batch_size": PARQUET_BATCH_SIZE} if form == "parquet" else {}
    for file in files if form == "parquet" else ():
        check_row_counts(Path(file))
    return keep_media_closed(
        datasets.load_dataset(form, data_files=files, split="train", streaming=True, **options)
    )


def load_saved_rows(folder: str) -> Any:
    """Load a folder that `save_to_disk` of `datasets` wrote; rows are Python objects, whatever
    format the folder names.
    """
    import datasets

    return keep_media_closed(datasets.load_from_disk(folder)).with_format(None)


def check_row_counts(path: Path) -> None:
    """Raise a UserError where the footer of a Parquet file has another number of rows than its
    groups of rows and its columns together, because readers would leave some out.
    """
    from pyarrow.parquet import read_metadata

    footer = read_metadata(path)
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    num_rows = sum(group.num_rows for group in groups)
    if num_rows != footer.num_rows:
        raise UserError(
            f"{path}: it is damaged: its footer counts {footer.num_rows} rows, and its groups of "
            f"rows {num_rows}; copy the file again"
        )
    for number in range(footer.num_columns):
        if footer.schema.column(number).max_repetition_level == 0:
            num_values = sum(group.column(number).num_values for group in groups)
            if num_values != num_rows:
                raise UserError(
                    f"{path}: it is damaged: it counts {num_rows} rows, and {num_values} values in "
                    f"column {footer.schema.column(number).path[:40]!r}; copy the file again"
                )


def keep_media_closed(rows: Any) -> Any:
    """Keep `datasets` from opening the pictures, sounds and films of rows; return the rows.

    A file tells `datasets` which columns hold media, and their values may be paths of other files
    or addresses, which it would read or fetch.
    """
    # A folder may hold several splits.
    for split in rows.values() if isinstance(rows, dict) else [rows]:
        # `split.features` would be a copy.
        _close_media(split.info.features)
    return rows


def _close_media(feature: Any) -> None:
    """Turn decoding off in a feature, and in those inside of it, except for JSON texts."""
    import datasets

    if isinstance(feature, dict):
        parts: Iterable[Any] = feature.values()
    elif isinstance(feature, (list, tuple)):
        parts = feature
    else:
        parts = [part for part in [getattr(feature, "feature", None)] if part is not None]
    for part in parts:
        _close_media(part)
    if hasattr(feature, "decode") and not isinstance(feature, datasets.Json):
        feature.decode = False


def _number_rows(path: Path, load: Callable[[], Iterable[Any]]) -> Iterator[FileRow]:
    """Yield the rows that `load` opens with the library `datasets`."""
    folder = path if path.is_dir() else path.parent
    try:
        for number, content in enumerate(load(), 1):
            yield FileRow(content, f"{path}, row {number}", folder)
    except UserError:
        raise
    except Exception as error:  # pyarrow and datasets raise many kinds
        raise UserError(
            f"{path}: it cannot be read ({first_line(error)}); see that it is complete and yours"
        ) from error
