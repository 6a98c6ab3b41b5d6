"""Choices: the constructors that a group can be set to. A yaml in conf/, or in the folder of --config-dir, defines each.

Nothing else is ever constructed: a name without a yaml is refused before anything of it is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hydra.utils import get_object

from spectrain.errors import UserError, suggest_nearest

from .schema import choice_files, load_yaml
from .signatures import PACKAGE_ROOT

_choice_folders: list[Path] = [PACKAGE_ROOT / "conf"]


def set_choice_folders(folders: Iterable[Path]) -> None:
    """Set the folders of choices: conf/ and those that the command names with --config-dir."""
    _choice_folders[:] = [folder.resolve() for folder in folders]


def list_constructors(group: str) -> dict[str, str]:
    """Return choice -> import path of its constructor, those of conf/ first; empty choices are left out."""
    return _read_constructors(tuple(_choice_folders)).get(group, {})


@cache
def _read_constructors(folders: tuple[Path, ...]) -> dict[str, dict[str, str]]:
    """Return group -> choice -> path. A node that a command's own yaml constructs, such as chat, is a group too."""
    paths: dict[str, dict[str, str]] = {}
    for folder in folders:
        nodes = [
            (path.stem, group, node) for path in sorted(folder.glob("*.yaml")) for group, node in _load_mapping(path).items()
        ]
        for group in sorted(entry.name for entry in folder.iterdir() if entry.is_dir()):
            nodes += [(name, group, _load_mapping(path)) for name, path in choice_files(group, [folder]).items()]
        for name, group, node in nodes:
            if isinstance(node, dict) and "_target_" in node and group not in ("recipe", "accelerate"):
                paths.setdefault(group, {}).setdefault(name, str(node["_target_"]))
    return paths


def _load_mapping(path: Path) -> dict[str, Any]:
    content = load_yaml(path)
    return content if isinstance(content, dict) else {}


def find_constructor(group: str, name: str) -> Any | None:
    """Import the constructor that a choice of a group names, such as a rule that lives outside of the core; None where no yaml
    has this choice."""
    path = list_constructors(group).get(name)
    return None if path is None else get_object(path)


def load_constructor(group: str, name: str) -> Any:
    """Import the constructor of a choice that ships with the project."""
    constructor = find_constructor(group, name)
    assert constructor is not None, f"conf/{group}/{name}.yaml names no constructor"
    return constructor


def find_choice(group: str, target: str) -> str | None:
    """Return the choice whose constructor has this import path, or None."""
    return next((choice for choice, path in list_constructors(group).items() if path == target), None)


def find_group(target: str) -> str:
    """Return the group that has a choice with this constructor; raise a UserError if no yaml names it."""
    for group, paths in _read_constructors(tuple(_choice_folders)).items():
        if target in paths.values():
            return group
    raise UserError(f"_target_={target}: no choice of conf/ names it; what is constructed has a yaml, there or in --config-dir")


def resolve_choice(group: str, saved: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Turn a group's saved settings, with `choice` or `_target_`, into a node to construct."""
    settings = {str(key): value for key, value in saved.items() if key not in ("choice", "_target_")}
    paths = list_constructors(group)
    if not paths:
        raise UserError(f"{location}: {group} names a choice and is no group of settings; delete it")
    name = choice_name(group, saved)
    if name not in paths:
        raise UserError(
            f"{location}: {group}={name}: there is no such choice; {suggest_nearest(name, paths)}, and what is "
            f"outside the project is "
            "found by --config-dir FOLDER"
        )
    return {"_target_": paths[name], **settings}


def choice_name(group: str, node: Mapping[str, Any]) -> str:
    """Return the choice that a group's settings construct; without a choice, the import path."""
    if "choice" in node:
        return str(node["choice"])
    path = str(node.get("_target_"))
    return find_choice(group, path) or path


def by_choice_name(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in their saved form, every group by its choice. No file grants permission to run a target's code."""
    unsaid = ("_target_", "trust_remote_code")
    return {
        str(group): {
            "choice": choice_name(str(group), node),
            **{key: value for key, value in node.items() if key not in unsaid},
        }
        if isinstance(node, Mapping) and "_target_" in node
        else node
        for group, node in config.items()
    }
