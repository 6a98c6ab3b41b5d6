"""What commands can be told: groups and their choices, as conf/ has them, and the keys of what they construct."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from .signatures import PACKAGE_ROOT, SettingKey, format_literal, list_keys


@dataclass
class CommandSchema:
    """What a command's configuration holds."""

    groups: dict[str, str | None] = field(default_factory=dict)  # group -> the choice made by default
    nodes: dict[str, str] = field(default_factory=dict)  # key -> the constructor that its settings are for
    keys: list[SettingKey] = field(default_factory=list)  # that are in no group


def conf_folders(words: Iterable[str] = ()) -> list[Path]:
    """Where configurations are: conf/, and what --config-dir names among the words of a command."""
    words, folders = list(words), [PACKAGE_ROOT / "conf"]
    for flag in ("--config-dir", "-cd"):
        if flag in words[:-1]:
            folders.append(Path(words[words.index(flag) + 1]))
        folders += [Path(word.partition("=")[2]) for word in words if word.startswith(f"{flag}=")]
    return [folder for folder in folders if folder.is_dir()]


def choice_files(group: str, folders: Iterable[Path]) -> dict[str, Path]:
    """Every choice of a group, by name."""
    found = {}
    for folder in folders:
        for path in (folder / group).rglob("*.yaml"):
            found[path.relative_to(folder / group).with_suffix("").as_posix()] = path
    return dict(sorted(found.items()))


def read_header(path: Path) -> str:
    """The comment that a yaml begins with."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines += [] if line.startswith("# @package") else [line[1:].strip()]
    return " ".join(lines)


def load_yaml(path: Path) -> dict[str, Any]:
    """A yaml as it stands, references unresolved."""
    return yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}


def load_schema(config: str) -> CommandSchema:
    """The configuration of this name."""
    path, found = PACKAGE_ROOT / "conf" / f"{config}.yaml", CommandSchema()
    content = load_yaml(path)
    for entry in content.get("defaults", ()):
        if isinstance(entry, str) and entry != "_self_":
            found = load_schema(entry)
        elif isinstance(entry, dict):
            found.groups |= {group: choice for group, choice in entry.items() if not group.startswith("override ")}
    comments = dict(re.findall(r"^(\w+):[^#\n]*# (.*)$", path.read_text(), re.MULTILINE))
    for name, value in content.items():
        if name in ("defaults", "hydra"):
            continue
        if isinstance(value, dict) and "_target_" in value:
            found.nodes[name] = value["_target_"]
        else:
            found.keys.append(
                SettingKey(name, "", format_literal(value), ("true", "false") * isinstance(value, bool), comments.get(name, ""))
            )
    return found


def select_choices(schema: CommandSchema, words: list[str]) -> dict[str, str]:
    """Group -> choice, as the words of a command, its recipe and the defaults make it."""
    said = {
        group: choice for word in words for group, equals, choice in [word.partition("=")] if equals and group in schema.groups
    }
    choices = {group: choice or find_only_choice(group, words) for group, choice in schema.groups.items()}
    choices = {group: choice for group, choice in choices.items() if choice and choice != "???"}
    recipe = choice_files("recipe", conf_folders(words)).get(said.get("recipe", "")) if "recipe" in schema.groups else None
    for entry in load_yaml(recipe).get("defaults", ()) if recipe else ():
        choices |= {group.removeprefix("override /"): choice for group, choice in entry.items()}
    return {group: choice.split(",")[0] for group, choice in (choices | said).items() if choice}


def find_only_choice(group: str, words: Iterable[str]) -> str | None:
    """The choice of a group that leaves none: all others are empty."""
    full = [name for name, path in choice_files(group, conf_folders(words)).items() if load_yaml(path).get("_target_")]
    return full[0] if len(full) == 1 else None


def settings_by_group(schema: CommandSchema, words: list[str]) -> dict[str, list[SettingKey]]:
    """Group -> its keys, with the values that the choices and the recipe among these words give them."""
    folders, choices = conf_folders(words), select_choices(schema, words)
    recipe = choice_files("recipe", folders).get(choices.get("recipe", ""))
    values = load_yaml(recipe) if recipe else {}
    found = {name: list_keys(target) for name, target in schema.nodes.items()}
    for group, choice in choices.items():
        path = choice_files(group, folders).get(choice)
        if path is None or group == "recipe" or not (node := load_yaml(path)).get("_target_"):
            continue
        changed = {**node, **values.get(group, {})}
        found[group] = [
            replace(key, default=format_default(changed[key.name])) if key.name in changed else key
            for key in list_keys(node["_target_"])
        ]
    return found


def find_owners(group: str, name: str, words: Iterable[str] = ()) -> list[str]:
    """The choices of a group that have a setting of this name."""
    if group == "recipe":
        return []
    nodes = {choice: load_yaml(path).get("_target_") for choice, path in choice_files(group, conf_folders(words)).items()}
    return [choice for choice, target in nodes.items() if target and any(key.name == name for key in list_keys(target))]


def format_default(value: Any) -> str | None:
    return None if value == "???" else format_literal(value)
