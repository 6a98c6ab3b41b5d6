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
from spectrain.files import COPY_AGAIN, SAVE_AS_UTF8, read_text, require_regular_file

# Bytes; the settings of a model take a few thousand.
MAX_FILE_BYTES = 16_000_000
# Bytes of a YAML file, of which Python's loader reads some hundred thousand in a second.
MAX_YAML_BYTES = 500_000
# Values of a YAML file of choices, those behind aliases each time.
MAX_YAML_VALUES = 50_000
# Digits of an integer; Python refuses to write more than some thousands.
MAX_DIGITS = 300


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
    return parse_file(path, _parse_yaml, "YAML", limit=MAX_YAML_BYTES)


def _parse_yaml(text: str) -> Any:
    content = yaml.load(text, _PlainLoader)
    check_values(content)
    return content


def check_choice_file(path: Path) -> None:
    """Raise a UserError where hydra could not read a YAML file of choices, which unlike saved
    settings may have aliases.
    """
    parse_file(
        path,
        lambda text: check_values(yaml.load(text, yaml.SafeLoader)),
        "YAML",
        "correct it",
        MAX_YAML_BYTES,
    )


def check_values(content: Any) -> None:
    """Raise a YAMLError for more values than settings have, as a few aliases make them, for an
    integer too long to be written, as 59:59:59 in base 60 makes it, and for half a character.
    """
    waiting = [content]
    number = 0
    while waiting:
        value = waiting.pop()
        number += 1
        if number > MAX_YAML_VALUES:
            raise yaml.YAMLError(f"it has more than {MAX_YAML_VALUES} values")
        if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
            raise yaml.YAMLError(f"an integer has more than {MAX_DIGITS} digits")
        if isinstance(value, str) and not is_unicode(value):
            raise yaml.YAMLError("a text has half of a character")
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, (list, tuple, set)):
            waiting += value


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


def is_unicode(text: str) -> bool:
    """Tell whether a text can be written as UTF-8: escapes may hold half of a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
                f"{path}: it has more than {limit / 1_000_000:g} MB, which no such file needs; "
                f"{remedy}"
            )
        return parse(read_text(path, SAVE_AS_UTF8 if remedy == COPY_AGAIN else remedy))
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
