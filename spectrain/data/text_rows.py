"""Rows of text files: lines of JSON, JSON and CSV.

Every value is what the file says. A library for tables would give all rows one type, so that a text
becomes JSON text where another row has a list in its place, and it would read a cell of CSV as a
number, a truth value or null.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spectrain.errors import UserError, describe_json_error
from spectrain.files import MAX_LINE_LENGTH, iterate_lines, open_text

# Bytes of a .json file, which is read whole.
MAX_JSON_BYTES = 4_000_000_000
JSON_SPACE = re.compile(r"[ \t\r\n\ufeff]*")

Row = tuple[Any, str]
"""A row, and where it stands."""


class RepeatedKey(ValueError):
    """A key that a JSON object has twice; the message is the key."""


def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise `RepeatedKey` where it has a key twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedKey(repr(next(name for name in names if names.count(name) > 1)[:40]))
    return made


def explain_no_json(error: Exception, location: str, advice: str) -> UserError:
    """Return the error of a text at this location that is not JSON, or not the JSON of a row."""
    if isinstance(error, RepeatedKey):
        return UserError(
            f"{location}: the key {error} is given twice, so one of its values would be lost; "
            "write each key once"
        )
    if isinstance(error, RecursionError):
        return UserError(f"{location}: its values are nested too deeply; {advice}")
    # Numbers of thousands of digits are refused by the integer type.
    assert isinstance(error, ValueError)
    return UserError(f"{location}: it is not JSON ({describe_json_error(error)}); {advice}")


def parse_line(line: str, location: str) -> Any:
    """Parse a line of JSON; a file that another library opened may begin with a byte-order mark."""
    try:
        return json.loads(line.removeprefix("\ufeff"), object_pairs_hook=make_object)
    except (ValueError, RecursionError) as error:
        raise explain_no_json(error, location, "write one object a line") from error


def iterate_line_rows(path: Path, on_error: Callable[[UserError], None]) -> Iterator[Row]:
    """Yield the rows of a file of JSON lines, which may be compressed; `on_error` takes the error
    of a line that is not JSON.
    """
    with open_text(path, is_compressed=path.suffix.lower() == ".gz") as lines:
        for number, line in enumerate(iterate_lines(lines, path), 1):
            if not line.strip():
                continue
            location = f"{path}, line {number}"
            try:
                row = parse_line(line, location)
            except UserError as error:
                on_error(error)
                continue
            yield row, location


def iterate_json_rows(path: Path, _: Callable[[UserError], None]) -> Iterator[Row]:
    """Yield the rows of a .json file: the elements of a list, or objects one after another."""
    if path.stat().st_size > MAX_JSON_BYTES:
        raise UserError(
            f"{path}: it has more than {MAX_JSON_BYTES // 10**9} GB, which are read at once; write "
            "one row a line, in a file that ends in .jsonl"
        )
    with open_text(path) as file:
        text = file.read()
    decoder = json.JSONDecoder(object_pairs_hook=make_object)
    position = _skip_space(text, 0)
    is_list = text.startswith("[", position)
    position = _skip_space(text, position + is_list)
    is_complete = not is_list or text.startswith("]", position)
    number = 0
    while position < len(text) and not (is_list and is_complete):
        number += 1
        location = f"{path}, row {number}"
        try:
            row, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise explain_no_json(error, location, "write a list of rows") from error
        yield row, location
        position = _skip_space(text, position)
        if is_list and text.startswith(",", position):
            position = _skip_space(text, position + 1)
        elif is_list and text.startswith("]", position):
            is_complete = True
        elif is_list:
            break
    rest = _skip_space(text, position + 1) if is_list else position
    if not is_complete or rest < len(text):
        problem = "there is more text behind its list" if is_complete else "its list does not end"
        raise UserError(
            f"{path}, after row {number}: it is not JSON ({problem}); write a list of rows"
        )


def _skip_space(text: str, position: int) -> int:
    space = JSON_SPACE.match(text, position)
    return position if space is None else space.end()


def iterate_csv_rows(path: Path, on_error: Callable[[UserError], None]) -> Iterator[Row]:
    """Yield the rows of a .csv file, whose first line names the columns. A cell is a text, or None
    where it is empty; `on_error` takes the error of a row with other columns.
    """
    # The limit is one of the process.
    csv.field_size_limit(MAX_LINE_LENGTH)
    with open_text(path, newline="") as file:
        rows = csv.reader(iterate_lines(file, path), strict=True)
        location = f"{path}, line 1"
        try:
            names = next(rows, [])
            if repeated := [name for name in names if names.count(name) > 1]:
                raise UserError(
                    f"{location}: two columns are called {repeated[0][:40]!r}, so one would be "
                    "lost; give each its own name"
                )
            location = f"{path}, line {rows.line_num + 1}"
            for cells in rows:
                if len(cells) == len(names):
                    yield {name: cell or None for name, cell in zip(names, cells)}, location
                elif cells:
                    on_error(
                        UserError(
                            f"{location}: it has {len(cells)} cells, and the first line names "
                            f"{len(names)} columns; put a cell that holds a comma in quotes"
                        )
                    )
                location = f"{path}, line {rows.line_num + 1}"
        except csv.Error as error:
            raise UserError(
                f"{location}: it is not CSV ({error}); put a cell that holds a comma, a quote or "
                "the end of a line in quotes, and write a quote in it twice"
            ) from error
