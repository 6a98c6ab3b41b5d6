"""Reading of files of a drafter, a run, an export or another project as data: no file decides
which code runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from spectrain.errors import UserError
from spectrain.files import read_text

from .build import GroupSpec
from .check import find_directives
from .command_only import drop_command_only, list_saved_settings

# Bytes; the settings of a model take a few thousand.
MAX_FILE_BYTES = 16_000_000
EXAMPLES = {"drafter": "eagle3", "target": "smollm2", "tree": "eagle2", "acceptance": "greedy"}
COPY_AGAIN = "copy the file again"


def read_json(path: Path, remedy: str = COPY_AGAIN, limit: int = MAX_FILE_BYTES) -> Any:
    """Read a JSON file of at most `limit` bytes; a UserError says why it cannot be read, and the
    `remedy`.
    """
    return parse_file(path, json.loads, "JSON", remedy, limit)


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


def require_regular_file(path: Path, remedy: str = COPY_AGAIN) -> None:
    """Raise a UserError where a path is a folder, a pipe, a device or a socket, which may never
    end.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: this is no file; {remedy}")


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
    except (ValueError, yaml.YAMLError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{path}: this is not {kind} ({reason[0]}); {remedy}") from error


def check_no_directives(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a file; raise a UserError if it holds a directive."""
    directive = next(find_directives(content), None)
    if directive is not None:
        raise UserError(f"{path}: {directive}; delete it")
    return content


def parse_description(content: Any, path: Path) -> dict[str, Any]:
    """Return a drafter's description as nodes: `drafter` and, if present, `target`, `tree` and
    `acceptance`.
    """
    groups = parse_groups(content, path)
    check_choices(groups, path)
    if groups.get("drafter") is None:
        raise UserError(
            f"{path}: this is not a drafter's description: it names no drafter; copy the file again"
        )
    return groups


def check_choices(groups: dict[str, Any], path: Path, place: str = "") -> None:
    """Raise a UserError where a group of a drafter's description is neither null nor a choice with
    its settings, or its recipe is no name; `place` stands before their keys."""
    for group in ("drafter", "target", "tree", "acceptance"):
        node = groups.get(group)
        if node is not None and not (isinstance(node, dict) and "_target_" in node):
            raise UserError(
                f"{path}: this is not a drafter's description: {place}{group} is not a choice "
                "with its settings, as in "
                f'{{"choice": "{EXAMPLES[group]}"}}; copy the file again'
            )
    if not isinstance(groups.get("recipe"), str | None):
        raise UserError(f"{path}: {place}recipe is not a recipe's name; copy the file again")


def parse_groups(content: Any, path: Path) -> dict[str, Any]:
    """Return saved settings as nodes to construct; a group without a choice is returned unchanged.

    The import path of a constructor may stand for its choice; it is looked up and used for nothing
    else. Settings that only a command sets are left out, with a line for each.
    """
    if not isinstance(content, dict):
        raise UserError(f"{path}: it holds no settings; copy the file again")
    groups: dict[str, Any] = {}
    bare = {
        group: {key: value for key, value in node.items() if key != "_target_"}
        if isinstance(node, dict) and "choice" not in node
        else node
        for group, node in content.items()
    }
    check_no_directives(bare, path)
    for group, node in drop_command_only(content, path).items():
        is_choice = isinstance(node, dict) and ("choice" in node or "_target_" in node)
        current = _update_node(node) if is_choice else node
        groups[str(group)] = (
            GroupSpec.from_saved(str(group), current, str(path)).node if is_choice else current
        )
    return groups


def _update_node(node: dict[str, Any]) -> dict[str, Any]:
    """Return a group's saved settings as they are written today, by the rules of installed
    packages.
    """
    for saved in list_saved_settings():
        path = str(node.get("_target_", ""))
        old = next(
            (
                old
                for old in saved.renamed
                if path == old or (old.endswith(".") and path.startswith(old))
            ),
            None,
        )
        if old is not None:
            node = {**node, "_target_": saved.renamed[old] + path.removeprefix(old)}
        node = node if saved.update is None else saved.update(node)
    return node
