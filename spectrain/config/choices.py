"""Choices and settings of a command: groups, the yamls in conf/ or --config-dir that define
choices, and the keys of each.

Nothing else is ever constructed: a name without a yaml is refused before anything of it is
imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from spectrain.errors import UserError
from spectrain.files import read_text

from .installed import list_conf_folders
from .plain_files import check_choice_file
from .signatures import PACKAGE_ROOT, SettingKey, format_literal, list_keys

# Folders of choices that a command names with --config-dir.
_named_folders: list[Path] = []


def set_choice_folders(folders: Iterable[Path]) -> None:
    """Set the folders of choices that the command names with --config-dir, beside conf/ and
    those of installed packages.
    """
    _named_folders[:] = [folder.resolve() for folder in folders]


def shipped_folders() -> tuple[Path, ...]:
    """Return the folders of choices that need no flag: conf/ and those of installed packages."""
    return (PACKAGE_ROOT / "conf", *list_conf_folders())


def conf_folders() -> tuple[Path, ...]:
    """Return the folders of choices: conf/, those of installed packages, and those that the command
    names.
    """
    return (*shipped_folders(), *_named_folders)


def named_folders(words: Iterable[str]) -> list[Path]:
    """Return the folders of choices that --config-dir names among the words of a command."""
    words = list(words)
    folders = list[Path]()
    for flag in ("--config-dir", "-cd"):
        if flag in words[:-1]:
            folders.append(Path(words[words.index(flag) + 1]))
        folders += [Path(word.partition("=")[2]) for word in words if word.startswith(f"{flag}=")]
    return [folder for folder in folders if folder.is_dir()]


def list_config_groups(folders: Iterable[Path]) -> set[str]:
    """Return the names of the groups that these folders have."""
    return {entry.name for folder in folders for entry in folder.iterdir() if entry.is_dir()}


def list_constructors(group: str) -> dict[str, str]:
    """Return choice -> import path of its constructor, those of conf/ first; empty choices are
    left out.
    """
    return _read_constructors(conf_folders()).get(group, {})


@cache
def _read_constructors(folders: tuple[Path, ...]) -> dict[str, dict[str, str]]:
    """Return group -> choice -> path. A node that a command's own yaml constructs, such as chat,
    is a group too.
    """
    paths: dict[str, dict[str, str]] = {}

    def add(group: str, name: str, node: Any) -> None:
        if isinstance(node, dict) and "_target_" in node:
            paths.setdefault(group, {}).setdefault(name, str(node["_target_"]))

    for folder in folders:
        for path in sorted(folder.glob("*.yaml")):
            for group, node in load_yaml(path).items():
                add(group, path.stem, node)
        for group in sorted(list_config_groups([folder]) - {"recipe", "accelerate"}):
            for name, path in choice_files(group, [folder]).items():
                add(group, name, load_yaml(path))
    return paths


def find_choice(group: str, target: str) -> str | None:
    """Return the choice whose constructor has this import path, or None."""
    return next(
        (choice for choice, path in list_constructors(group).items() if path == target), None
    )


def find_group(target: str) -> str:
    """Return the group that has a choice with this constructor; raise a UserError if no yaml
    names it.
    """
    for group, paths in _read_constructors(conf_folders()).items():
        if target in paths.values():
            return group
    raise UserError(
        f"_target_={target}: no choice of conf/ names it; what is constructed has a yaml, there "
        "or in --config-dir"
    )


def choice_name(group: str, node: Mapping[str, Any]) -> str:
    """Return the choice that a group's settings construct; without a choice, the import path."""
    if "choice" in node:
        return str(node["choice"])
    path = str(node.get("_target_"))
    return find_choice(group, path) or path


FOLDER_KEYS = ("run", "out", "path")
"""Settings in no group whose values name folders, by a number too."""
TEXT = str | None
TEXT_TYPES: dict[str, Any] = {"recipes": list[str] | str | None, "runs": list[str] | str | None}
"""Types of the settings in no group whose default in conf/ is a text or null, where that is not
one text.
"""


@dataclass
class CommandSchema:
    """The configuration of a command."""

    # Group -> its default choice.
    groups: dict[str, str | None] = field(default_factory=dict)
    # Key -> the constructor of its settings.
    nodes: dict[str, str] = field(default_factory=dict)
    # The settings that are in no group.
    keys: list[SettingKey] = field(default_factory=list)
    # Group -> the settings that the command itself gives it.
    values: dict[str, dict[str, Any]] = field(default_factory=dict)


def check_files(folders: Iterable[Path]) -> None:
    """Raise a UserError for a yaml of these folders that is no UTF-8 text or no YAML, which hydra
    would not name.
    """
    for path in (path for folder in folders for path in folder.rglob("*.yaml")):
        try:
            check_choice_file(path)
        except UserError as error:
            cause = error.__cause__
            if isinstance(cause, UnicodeDecodeError):
                raise UserError(
                    f"{path}: it is no text ({cause.reason}); save it as UTF-8"
                ) from error
            raise


def choice_files(group: str, folders: Iterable[Path] | None = None) -> dict[str, Path]:
    """Return every choice of a group in these folders, or in all: name -> file."""
    files = {}
    for folder in conf_folders() if folders is None else folders:
        for path in (folder / group).rglob("*.yaml"):
            files[path.relative_to(folder / group).with_suffix("").as_posix()] = path
    return dict(sorted(files.items()))


def read_header(path: Path) -> str:
    """Return the comment at the top of a yaml."""
    lines = []
    for line in read_text(path).splitlines():
        if not line.startswith("#"):
            break
        lines += [] if line.startswith("# @package") else [line[1:].strip()]
    return " ".join(lines)


def load_yaml(path: Path) -> dict[str, Any]:
    """Load the mapping in a yaml without resolving its references; anything else is empty."""
    content = yaml.load(read_text(path), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return content if isinstance(content, dict) else {}


def load_schema(config: str) -> CommandSchema:
    """Load the schema of the configuration with this name."""
    paths = [folder / f"{config}.yaml" for folder in conf_folders()]
    path = next((path for path in paths if path.exists()), paths[0])
    result = CommandSchema()
    content = load_yaml(path)
    for entry in content.get("defaults", ()):
        if isinstance(entry, str) and entry != "_self_":
            result = load_schema(entry)
        elif isinstance(entry, dict):
            result.groups |= {
                group: choice
                for group, choice in entry.items()
                if not group.startswith("override ")
            }
    comments = _read_comments(path.read_text())
    for name, value in content.items():
        if name in ("defaults", "hydra"):
            continue
        if isinstance(value, dict) and "_target_" in value:
            result.nodes[name] = value["_target_"]
        elif name in result.groups:
            result.values[name] = value
        else:
            result.keys.append(
                SettingKey(
                    name,
                    "",
                    format_literal(value),
                    ("true", "false") * isinstance(value, bool),
                    comments.get(name, ""),
                    type(value) if isinstance(value, (bool, int)) else TEXT_TYPES.get(name, TEXT),
                )
            )
    return result


def _read_comments(text: str) -> dict[str, str]:
    """Return the comment lines directly above each top-level key of a yaml: key -> its
    description.
    """
    blocks = re.findall(r"((?:^# .*\n)+)(\w+):", text, re.MULTILINE)
    return {
        name: " ".join(line.removeprefix("# ") for line in block.splitlines())
        for block, name in blocks
    }


def select_choices(schema: CommandSchema, words: list[str]) -> dict[str, str]:
    """Return group -> choice, from the words of a command, its recipe and the defaults."""
    overrides = {
        group: choice
        for word in words
        for group, equals, choice in [word.partition("=")]
        if equals and group in schema.groups
    }
    choices = {
        group: choice or find_default_choice(group) for group, choice in schema.groups.items()
    }
    choices = {group: choice for group, choice in choices.items() if choice and choice != "???"}
    recipe = (
        choice_files("recipe").get(overrides.get("recipe", ""))
        if "recipe" in schema.groups
        else None
    )
    for entry in load_yaml(recipe).get("defaults", ()) if recipe else ():
        choices |= {group.removeprefix("override /"): choice for group, choice in entry.items()}
    return {
        group: choice.split(",")[0] for group, choice in (choices | overrides).items() if choice
    }


def find_default_choice(group: str) -> str | None:
    """Return the choice of a group that a command takes whose own default is null: the only one
    that is not empty, or the one named default; None if there is neither."""
    full = [name for name, path in choice_files(group).items() if load_yaml(path).get("_target_")]
    return full[0] if len(full) == 1 else "default" if "default" in full else None


def settings_by_group(schema: CommandSchema, words: list[str]) -> dict[str, list[SettingKey]]:
    """Return group -> settings, with the values that the choices and the recipe among these
    words set.
    """
    choices = select_choices(schema, words)
    recipe = choice_files("recipe").get(choices.get("recipe", ""))
    values = load_yaml(recipe) if recipe else {}
    result = {name: list_keys(target) for name, target in schema.nodes.items()}
    for group, choice in choices.items():
        path = choice_files(group).get(choice)
        if path is None or group == "recipe" or not (node := load_yaml(path)).get("_target_"):
            continue
        given = values.get(group, {})
        unused = [
            key for key, value in given.items() if is_for_embedded(value) and choice != "embedded"
        ]
        changed = {**node, **schema.values.get(group, {}), **given, **dict.fromkeys(unused)}
        result[group] = [
            replace(key, default=format_default(values_of_key[0])) if values_of_key else key
            for key in list_keys(node["_target_"])
            for values_of_key in [find_values(changed, key)]
        ]
    return result


def find_values(node: Mapping[str, Any], key: SettingKey) -> list[Any]:
    """Return the value of a setting in a node, in its part or outside of it, as a list; an empty
    one where the node does not set it.
    """
    part = node.get(key.part)
    inner = [part[key.name]] if isinstance(part, Mapping) and key.name in part else []
    return [node[key.name]] if key.name in node else inner


def find_owners(group: str, name: str) -> list[str]:
    """Return the choices of a group that have a setting with this name."""
    return [
        choice
        for choice, target in sorted(list_constructors(group).items())
        if any(key.name == name for key in list_keys(target))
    ]


def is_for_embedded(value: Any) -> bool:
    """Tell whether a value of a recipe is for the embedded conversations only."""
    return isinstance(value, str) and value.startswith("${embedded:")


def format_default(value: Any) -> str | None:
    return None if value == "???" else format_literal(value)
