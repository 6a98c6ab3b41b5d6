"""Saved settings of a drafter, a run, an export or another project as nodes to construct: no file
decides which code runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spectrain.errors import UserError

from .build import GroupSpec
from .check import find_directives
from .command_only import drop_command_only, list_saved_settings

EXAMPLES = {"drafter": "eagle3", "target": "smollm2", "tree": "eagle2", "acceptance": "greedy"}


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
