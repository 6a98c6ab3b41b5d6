"""Settings by part: eval.dataset.limit is the same setting as eval.limit.

A group has parts if the dataclasses of its settings name them, as those of eval/settings.py do. A
name is unique in its group, so its part may be left out. Words of commands, files and Python may
write either form, and files hold parts as mappings; all of them are read here. Behind this module a
setting has its name alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from spectrain.errors import UserError, suggest_nearest

from .choices import list_constructors
from .signatures import SettingKey, list_keys

GROUPS_WITH_PARTS = ("eval",)
WORD_PATTERN = re.compile(r"((?:\+\+|\+|~)?)(\w+)\.(\w+)\.(\w+)(=.*)?", re.DOTALL)


def list_part_keys(group: str, target: str | None = None) -> dict[str, SettingKey]:
    """Return PART.NAME -> setting, of one constructor of a group or, without one, of all of
    them; empty for a group without parts.
    """
    if group not in GROUPS_WITH_PARTS:
        return {}
    targets = list_constructors(group).values() if target is None else [target]
    return {key.full_name: key for path in targets for key in list_keys(path) if key.part}


def drop_part(word: str) -> str:
    """Return a word of a command without the part of its setting, as eval.limit=3 for
    eval.dataset.limit=3. A word that names no setting of a part is returned unchanged.
    """
    match = WORD_PATTERN.fullmatch(word)
    if match is None:
        return word
    sign, group, part, name, value = match.groups()
    is_in_part = f"{part}.{name}" in list_part_keys(group)
    return f"{sign}{group}.{name}{value or ''}" if is_in_part else word


def drop_parts(words: Iterable[str]) -> list[str]:
    """Return the words of a command without the parts of their settings."""
    return [drop_part(word) for word in words]


def flatten_settings(
    group: str, settings: Mapping[str, Any], target: str | None = None
) -> dict[str, Any]:
    """Return the settings of a group by name, those of its parts too. A setting outside of its part
    counts before the same one inside; a UserError names one that a part does not have.
    """
    keys = list_part_keys(group, target)
    parts = {key.part for key in keys.values()}
    inner: dict[str, Any] = {}
    outer: dict[str, Any] = {}
    for name, value in settings.items():
        if name in keys:
            inner[keys[name].name] = value
        elif name in parts and isinstance(value, Mapping):
            for key in value:
                if f"{name}.{key}" not in keys:
                    raise UserError(
                        f"{group}.{name}.{key}: there is no such key; "
                        f"{suggest_full_name(group, name, str(key), keys)}"
                    )
            inner |= value
        else:
            outer[str(name)] = value
    return {**inner, **outer}


def suggest_full_name(group: str, part: str, name: str, keys: Mapping[str, SettingKey]) -> str:
    """Name the part that has a setting, or else the settings of the part with similar names."""
    owner = next((key for key in keys.values() if key.name == name), None)
    if owner is not None:
        return f"write {group}.{owner.full_name}"
    return suggest_nearest(name, [key.name for key in keys.values() if key.part == part])


def flatten_groups(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain containers by group, with all settings of a group by name."""
    return {
        str(group): flatten_settings(str(group), node) if isinstance(node, Mapping) else node
        for group, node in config.items()
    }


def group_settings(settings: Mapping[str, Any], target: str) -> dict[str, Any]:
    """Return the settings of a constructor with those of each part in a mapping, as files hold
    them. Settings without a part stand first.
    """
    part_of = {key.name: key.part for key in list_keys(target) if key.part}
    result = {name: value for name, value in settings.items() if name not in part_of}
    for name, value in settings.items():
        if name in part_of:
            result.setdefault(part_of[name], {})[name] = value
    return result
