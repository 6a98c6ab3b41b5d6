"""Rows of data files: text (`text_rows.py`), and the tables that `datasets` reads."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from spectrain.errors import UserError, first_line
from spectrain.files import iterate_lines, require_regular_file

from .shards import MANIFEST, ShardSet
from .text_rows import iterate_csv_rows, iterate_json_rows, iterate_line_rows

if TYPE_CHECKING:
    import datasets
    import pyarrow

LINE_SUFFIXES = (".jsonl", ".jsonl.gz")
TEXT_FORMATS = {".json": iterate_json_rows, ".csv": iterate_csv_rows}
"""How the rows of a file of text are read that are not lines of JSON, by its suffix."""
TABLE_FORMATS = {".parquet": "parquet", ".arrow": "arrow"}
"""The name that `datasets` has for each format, by the suffix of a file."""
ROW_SUFFIXES = (*LINE_SUFFIXES, *TEXT_FORMATS, *TABLE_FORMATS)
PARQUET_BATCH_SIZE = 256
"""Rows of a Parquet file that are read at once."""


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
    files = [entry for entry in list_entries(path) if is_row_file(entry)]
    if not files:
        problem = "the folder holds no data file" if path.is_dir() else "there is no such file"
        raise UserError(
            f"data.path={source}: {problem}; give a file that ends in {', '.join(ROW_SUFFIXES)}"
        )
    return files


def list_ignored_files(source: str) -> Counter[str]:
    """Count what a folder or a pattern names and `list_files` does not read, by kind."""
    path = Path(source).expanduser()
    if path.is_file() or (path / MANIFEST).is_file():
        return Counter()
    ignored: Counter[str] = Counter()
    for entry in list_entries(path):
        if entry.is_file() and not is_row_file(entry):
            ending = f"that ends in {entry.suffix!r}" if entry.suffix else "without an ending"
            ignored[f"file {ending} in data.path"] += 1
        ignored["folder within data.path"] += path.is_dir() and entry.is_dir()
    return +ignored


def list_entries(path: Path) -> list[Path]:
    """Return what is in a folder, or what a pattern names, in the order of the names."""
    pattern = str(path / "*") if path.is_dir() else str(path)
    return [*map(Path, sorted(glob(pattern, recursive=True)))]


def is_row_file(path: Path) -> bool:
    """Tell whether a file holds rows, by its name."""
    return path.name.lower().endswith(ROW_SUFFIXES)


def raise_error(error: UserError) -> None:
    """Raise the error of a row."""
    raise error


def read_rows(
    source: str,
    on_error: Callable[[UserError], None] = raise_error,
    unread: Counter[str] | None = None,
) -> Iterator[FileRow]:
    """Yield the rows of all files that a path, a directory or a pattern names; `on_error` takes
    those that are no JSON, and `unread` counts files that are not read or hold no row.
    """
    folder = Path(source).expanduser()
    if (folder / "dataset_info.json").is_file():
        yield from _number_rows(folder, lambda: load_saved_rows(str(folder)))
        return
    files = list_files(source)
    if unread is not None:
        unread.update(list_ignored_files(source))
    for path in files:
        is_empty = True
        for row in read_file(path, on_error):
            is_empty = False
            yield row
        if is_empty and unread is not None:
            unread["file without a usable row"] += 1


def read_file(path: Path, on_error: Callable[[UserError], None] = raise_error) -> Iterator[FileRow]:
    """Yield the rows of one file; `on_error` takes the error of a line that is no JSON."""
    require_regular_file(path, "give a file of rows")
    suffix = path.suffix.lower()
    if suffix in TABLE_FORMATS:
        form = TABLE_FORMATS[suffix]
        yield from _number_rows(path, lambda: open_table_files(form, [str(path)]))
        return
    iterate_rows = TEXT_FORMATS.get(suffix, iterate_line_rows)
    location = ""
    try:
        for content, location in iterate_rows(path, on_error):
            yield FileRow(content, location, path.parent)
    except UserError as error:
        if not location and not is_row_file(path):
            raise explain_ending(path) from error
        raise
    except UnicodeDecodeError as error:
        if not is_row_file(path):
            raise explain_ending(path) from error
        raise UserError(
            f"{path}, line {find_line_of_no_text(path)}: it is no text ({error.reason}); save it "
            "as UTF-8 text"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        where = f"{path}, after {location.removeprefix(f'{path}, ')}" if location else str(path)
        raise UserError(
            f"{where}: it cannot be read ({first_line(error)}); see that it is complete and yours"
        ) from error


def explain_ending(path: Path) -> UserError:
    """Return the error of a file that holds no rows, neither by its name nor by its content."""
    ending = path.suffix or ".txt"
    return UserError(
        f"{path}: it holds no rows, by its name and by its beginning; give a file that ends in "
        f"{', '.join(ROW_SUFFIXES)}, or the folder of texts with data=text "
        f"data.path=FOLDER data.suffixes=[{ending}]"
    )


def open_bytes(path: Path) -> BinaryIO:
    """Open a file of rows to read its bytes, unpacked where its name ends in .gz."""
    require_regular_file(path)
    return cast(
        BinaryIO, gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")
    )


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


def list_table_rows(table: pyarrow.Table) -> list[dict[str, Any]]:
    """Return the rows of a table as Python objects. `datasets` keeps values of several types as
    JSON texts, which are parsed.
    """
    rows = table.to_pylist()
    for column in table.schema:
        if _holds_json(column.type):
            for row in rows:
                row[column.name] = _parse_json_values(row[column.name], column.type)
    return cast(list[dict[str, Any]], rows)


def _holds_json(kind: Any) -> bool:
    """Tell whether a type of a column is JSON, or has JSON in it."""
    parts = [kind.field(number).type for number in range(kind.num_fields)]
    return getattr(kind, "extension_name", "") == "arrow.json" or any(map(_holds_json, parts))


def _parse_json_values(value: Any, kind: Any) -> Any:
    """Parse the JSON texts in a value of this type."""
    if value is None or not _holds_json(kind):
        return value
    if isinstance(value, dict):
        return {
            name: _parse_json_values(part, kind.field(name).type) for name, part in value.items()
        }
    if isinstance(value, list):
        return [_parse_json_values(part, kind.value_type) for part in value]
    return json.loads(value)


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
