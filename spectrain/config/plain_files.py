"""Reading of JSON and YAML files as plain values: no file decides which code runs.

Nothing here imports what composes or checks a configuration, so whatever decodes may read files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from spectrain.errors import UserError
from spectrain.files import COPY_AGAIN, read_text, require_regular_file

# Bytes; the settings of a model take a few thousand.
MAX_FILE_BYTES = 16_000_000


def read_json(path: Path, remedy: str = COPY_AGAIN, limit: int = MAX_FILE_BYTES) -> Any:
    """Read a JSON file of at most `limit` bytes; a UserError says why it cannot be read, and the
    `remedy`.
    """
    return parse_file(path, parse_json, "JSON", remedy, limit)


class ContradictoryKey(ValueError):
    """A key that a group of settings has twice, with different values; the message is the key."""


def parse_json(text: str) -> Any:
    """Return the value of a JSON text; raise ContradictoryKey for a key with two values."""
    return json.loads(text, object_pairs_hook=merge_pairs)


def merge_pairs(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return settings by name; raise ContradictoryKey for a name with two values, of which every
    reader could take the other one.
    """
    settings: dict[str, Any] = {}
    for key, value in pairs:
        if key in settings and settings[key] != value:
            raise ContradictoryKey(str(key)[:40])
        settings[key] = value
    return settings


def read_yaml(path: Path) -> Any:
    """Read a YAML file of plain values."""
    return parse_file(path, lambda text: yaml.load(text, _PlainLoader), "YAML")


def read_json_object(path: Path, limit: int = MAX_FILE_BYTES) -> dict[str, Any]:
    """Read a JSON file of at most `limit` bytes that holds settings by name."""
    content = read_json(path, limit=limit)
    if not isinstance(content, dict):
        raise UserError(f"{path}: it holds no settings; copy the file again")
    return content


class _PlainLoader(yaml.SafeLoader):
    """The Python loader, because the C loader crashes on deep nesting. It refuses aliases, so
    that small files stay small.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it refers to a value by an alias")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping, whose values are constructed with it, because they are compared."""
        settings = super().construct_mapping(node, deep=True)
        if len(settings) < len(node.value):
            merge_pairs(
                (self.construct_object(key), self.construct_object(value, deep=True))
                for key, value in node.value
            )
        return settings


def parse_file(
    path: Path,
    parse: Callable[[str], Any],
    kind: str,
    remedy: str = COPY_AGAIN,
    limit: int = MAX_FILE_BYTES,
) -> Any:
    """Return what `parse` makes of a text file of at most `limit` bytes; `kind` names its format
    in messages.
    """
    try:
        require_regular_file(path, remedy)
        if path.stat().st_size > limit:
            raise UserError(
                f"{path}: it has more than {limit // 1_000_000} MB, which no such file needs; "
                f"{remedy}"
            )
        return parse(read_text(path))
    except OSError as error:
        raise UserError(
            f"{path}: it cannot be read ({error.strerror}); see that it is there and yours"
        ) from error
    except UserError:
        raise
    except RecursionError as error:
        raise UserError(f"{path}: its values are nested too deeply; {remedy}") from error
    except ContradictoryKey as error:
        raise UserError(
            f"{path}: {error} is given twice, with different values; leave one of them out"
        ) from error
    except (ValueError, yaml.YAMLError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{path}: this is not {kind} ({reason[0]}); {remedy}") from error
