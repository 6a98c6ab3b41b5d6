"""The one merge of settings, which remembers the layer that sets each value.

A later layer replaces what an earlier one sets: the constructor's defaults, the choices of conf/,
the recipe, the files of a run, a settings file, and the command. Hydra composes conf/, the recipe,
the settings file and the command; what it composed is taken apart again by the words of the last
two, and the run's settings go between.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from spectrain.errors import UserError

from .build import GroupSpec, Layer, to_containers
from .check import check_config
from .choices import (
    choice_files,
    conf_folders,
    find_owners,
    list_constructors,
    load_schema,
    load_yaml,
    select_choices,
)
from .grouped import flatten_groups, flatten_settings
from .settings_file import SettingsFile

Layers = dict[str, dict[str, Layer]]
"""Group -> name of a setting, or "choice" -> the layer that sets it."""


@dataclass(frozen=True)
class LowerLayers:
    """The settings below those that a command names, as nodes of hydra by group."""

    # What conf/ chooses where neither the run nor the command does.
    config: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    # The run folder or the drafter directory that the settings of the run come from.
    origin: Path | None = None


def resolve(
    config: Mapping[str, Any],
    allowed_keys: Iterable[str],
    words: Iterable[str] | None = (),
    recipe: str | None = None,
    lower: LowerLayers | None = None,
    file: SettingsFile | None = None,
) -> dict[str, Any]:
    """Return a command's checked settings by key: groups as GroupSpec, other keys as plain values.

    All that is composed counts as the command's where its `words` are None, as for a command whose
    groups are null in conf/. The words of a settings `file` are among them. With `lower` layers the
    configuration is of plain containers. A UserError names the key that is wrong.
    """
    allowed_keys = list(allowed_keys)
    origin = None if file is None else file.path
    if lower is None:
        checked = check_config(config, allowed_keys)
        layers = find_layers(checked, words, recipe, file)
    else:
        composed, requested = split_command(flatten_groups(config), words)
        merged, layers = merge_layers(
            {"config": {**lower.config, **composed}, "run": lower.run, "command": requested}
        )
        checked = check_config(merged, allowed_keys)
        origin = lower.origin
    check_no_empty_group(checked, layers)
    return {
        **checked,
        **{
            key: GroupSpec.from_node(key, checked.get(key), layers.get(key, {}), origin)
            for key in allowed_keys
            if list_constructors(key)
        },
    }


def check_no_empty_group(config: Mapping[str, Any], layers: Layers) -> None:
    """Raise a UserError where a command, or its file, sets a value of a group without a choice,
    which nothing reads. A group that it empties itself, as in eval=none, may have some.
    """
    for group, own in layers.items():
        node = config[group]
        # A null group has no settings.
        if node is None or "_target_" in node or own.get("choice") in ("command", "file"):
            continue
        name = next((name for name, layer in own.items() if layer in ("command", "file")), None)
        if name is not None and list_constructors(group):
            choices = sorted({*choice_files(group)} - {"none"})
            owners = find_owners(group, name) or choices
            example = "hf" if "hf" in owners else owners[0]
            raise UserError(
                f"{group}.{name} is read by nothing, because no {group} is chosen; choose one too, "
                f"as in {group}={example} (valid are {', '.join(choices)})"
            )


def find_named_keys(words: Iterable[str]) -> dict[str, set[str]]:
    """Return group -> the settings of it that a command's words name; "choice" is the group's own
    choice.
    """
    named: dict[str, set[str]] = {}
    for word in words:
        name = re.split(r"[=@]", word.lstrip("+~"), maxsplit=1)[0]
        group, _, setting = name.partition(".")
        named.setdefault(group, set()).add(setting.partition(".")[0] or "choice")
    return named


def find_layers(
    config: Mapping[str, Any],
    words: Iterable[str] | None,
    recipe: str | None,
    file: SettingsFile | None = None,
) -> Layers:
    """Return the layers of a composed configuration, which no run has settings for."""
    of_file = find_named_keys(() if file is None else file.words)
    named = None if words is None else find_named_keys(words)
    path = choice_files("recipe").get(recipe) if recipe else None
    values = flatten_groups(load_yaml(path)) if path is not None else {}
    changed = {
        group.removeprefix("override /") for entry in values.get("defaults", ()) for group in entry
    }
    layers: Layers = {}
    for group, node in config.items():
        if not isinstance(node, Mapping):
            continue
        below: Layer = "command" if named is None else "config"
        own = dict.fromkeys(map(setting_name, node), below)
        if named is not None:
            of_recipe = [*values.get(group, {}), *(["choice"] if group in changed else [])]
            own |= dict.fromkeys(of_recipe, "recipe")
            own |= dict.fromkeys(named.get(group, ()), "command")
            own |= dict.fromkeys(of_file.get(group, ()), "file")
        layers[str(group)] = own
    return layers


def setting_name(key: Any) -> str:
    """Return the name by which a key of a node has its layer."""
    return "choice" if key == "_target_" else str(key)


def split_command(
    composed: Mapping[str, Any], words: Iterable[str] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what conf/ sets in a composed configuration, and what the words of the command set; a
    choice brings the settings of its yaml.
    """
    if words is None:
        return {}, dict(composed)
    named = find_named_keys(words)
    config: dict[str, Any] = {}
    command: dict[str, Any] = {}
    for group, node in composed.items():
        keys = named.get(group, set())
        if not isinstance(node, Mapping) or "choice" in keys or not keys:
            (command if keys else config)[group] = node
        else:
            config[group] = {key: value for key, value in node.items() if key not in keys}
            command[group] = {key: value for key, value in node.items() if key in keys}
    return config, command


def merge_layers(settings: Mapping[Layer, Mapping[str, Any]]) -> tuple[dict[str, Any], Layers]:
    """Return the merged nodes of layers, and the layer of each value. A choice replaces the whole
    group; settings alone change those of the layer below.
    """
    merged: dict[str, Any] = {}
    layers: Layers = {}
    for layer, nodes in settings.items():
        for group, node in nodes.items():
            if node is None and merged.get(group) is not None:
                continue
            own: dict[str, Layer] = {}
            if isinstance(node, Mapping):
                own = dict.fromkeys(map(setting_name, node), layer)
            if isinstance(node, Mapping) and "_target_" not in node and merged.get(group):
                merged[group] = merge_values(merged[group], node)
                layers[group] = {**layers[group], **own}
            else:
                merged[group] = node
                layers[group] = own
    return merged, layers


def merge_values(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings changed by those above them, mappings entry by entry."""
    merged = dict(below)
    for key, value in above.items():
        earlier = below.get(key)
        if isinstance(value, Mapping) and isinstance(earlier, Mapping):
            merged[key] = merge_values(earlier, value)
        else:
            merged[key] = value
    return merged


def default_group(group: str) -> GroupSpec:
    """Return a group as a training takes it where nothing chooses it; an empty one if it has no
    default choice.
    """
    file = Path(group) / f"{load_schema('train').groups[group]}.yaml"
    path = next((folder / file for folder in conf_folders() if (folder / file).exists()), None)
    node = to_containers(OmegaConf.create(load_yaml(path))) if path is not None else {}
    node = flatten_settings(group, node)
    return GroupSpec.from_node(group, node, dict.fromkeys(map(setting_name, node), "config"))


def load_chosen(group: str, word: str) -> Any:
    """Import the constructor of a group that one word of a training chooses, as the drafter of
    recipe=eagle3.
    """
    choice = select_choices(load_schema("train"), [word])[group]
    return GroupSpec(group, choice).load_constructor()
