"""Reading of JSON files as types: every value is compared with its annotation, and nothing is
converted.

Every error is a UserError that names the file, what is wrong with it and what to do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from spectrain.config.plain_files import MAX_FILE_BYTES, read_json
from spectrain.errors import UserError
from spectrain.files import COPY_AGAIN

Content = TypeVar("Content")


def read_json_as(
    path: Path, schema: type[Content], remedy: str = COPY_AGAIN, limit: int = MAX_FILE_BYTES
) -> Content:
    """Return the content of a JSON file as a type that pydantic can check; name the first key
    that does not have its type.
    """
    content = read_json(path, remedy, limit)
    try:
        # Text, because only there may a list stand for a tuple and a text for the number that is a
        # key.
        return TypeAdapter(schema).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        raise UserError(f"{path}: {describe_violation(error)}; {remedy}") from error


def describe_violation(error: ValidationError) -> str:
    """Describe the first value that does not have its type."""
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"it lacks {key}"
    problem = first["msg"][0].lower() + first["msg"][1:]
    return (
        f"{key}={str(first['input'])[:60]!r}: {problem}"
        if key
        else f"it holds something else ({problem})"
    )
