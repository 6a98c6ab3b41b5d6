"""Checks of settings against their constructors, and construction of what groups of settings name.

A check parses the constructor's source and does not import it. Only what a yaml in conf/ names is
constructed.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from spectrain.errors import UserError, suggest_nearest

from .choices import (
    CommandSchema,
    choice_files,
    choice_name,
    conf_folders,
    find_choice,
    find_group,
    find_owners,
    list_constructors,
    load_yaml,
    select_choices,
)
from .command_only import drop_command_only, list_downloaded, without_downloads
from .missing import explain_missing
from .parts import add_parts
from .signatures import SettingKey, has_source, list_keys

Layer = Literal["default", "config", "recipe", "run", "command"]
# Who sets a value; a later layer replaces what an earlier one set. "default" is the constructor's,
# "config" is what conf/ chooses, and "run" is a file that the command names.
LAYERS: tuple[Layer, ...] = typing.get_args(Layer)
RUN: Layer = "run"
# Messages for numbers out of bounds, by pydantic's name of the error.
BOUND_TEXTS = {
    "greater_than_equal": "use {ge} or more",
    "greater_than": "use more than {gt}",
    "less_than_equal": "use {le} or less",
    "less_than": "use less than {lt}",
}
# Keys that hydra obeys.
HYDRA_DIRECTIVES = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")
# Keys of transformers that refer to code stored with the weights.
REMOTE_CODE_KEYS = ("auto_map", "trust_remote_code")
# Of a value in a message.
MAX_SHOWN_CHARACTERS = 300
# Values of a list or a group in a file; the longest are the nodes of a fixed tree, 4096.
MAX_VALUES = 10_000
# Levels of nested settings.
MAX_NESTING = 64


def register_resolvers(device: str = "auto") -> None:
    """Let hydra find the choices of installed packages and what `${cpu_gpu:A,B}` and
    `${embedded:A}` stand for: A on a machine without a GPU and B on one with a GPU, or according to
    `device`; A of the embedded conversations, and null of data that the user names."""
    import torch

    from .search_path import register_search_path

    register_search_path()
    has_gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
    OmegaConf.register_new_resolver(
        "cpu_gpu", lambda cpu, gpu: gpu if has_gpu else cpu, replace=True
    )
    OmegaConf.register_new_resolver("embedded", _resolve_embedded, replace=True)


def _resolve_embedded(value: Any, *, _parent_: Any) -> Any:
    """Return the value where the group that holds it chooses the embedded conversations."""
    return value if choice_name("data", _parent_) == "embedded" else None


@dataclass(frozen=True)
class GroupSpec:
    """One group of a configuration: its choice and its settings. It is falsy where the group is
    empty, as tracker=none.
    """

    group: str
    # Name of the yaml in conf/, or the import path of a constructor that no yaml names; None for an
    # empty group.
    choice: str | None = None
    # The values that the configuration sets; everything else is the constructor's default.
    settings: Mapping[str, Any] = field(default_factory=dict)
    # Name of a setting, or "choice" -> the layer that set it; settings that no layer set are the
    # constructor's defaults.
    layers: Mapping[str, Layer] = field(default_factory=dict, compare=False)
    # The file or the folder of the layer "run".
    file: str | None = field(default=None, compare=False)

    def __bool__(self) -> bool:
        return self.choice is not None

    @classmethod
    def from_node(
        cls,
        group: str,
        node: Any,
        layers: Mapping[str, Layer] | None = None,
        origin: Path | None = None,
    ) -> GroupSpec:
        """Read a node of hydra, with a `_target_` and settings, or an empty one."""
        plain = to_containers(node or {})
        settings = {key: value for key, value in plain.items() if key != "_target_"}
        choice = choice_name(group, plain) if "_target_" in plain else None
        return cls(group, choice, settings, layers or {}, None if origin is None else str(origin))

    @classmethod
    def from_saved(cls, group: str, saved: Mapping[str, Any], location: str) -> GroupSpec:
        """Read a group's saved settings, with `choice` or, in older files, `_target_`; a UserError
        says at which `location` an unknown choice stands.
        """
        choices = list_constructors(group)
        if not choices:
            raise UserError(
                f"{location}: {group} names a choice and is no group of settings; delete it"
            )
        name = choice_name(group, saved)
        if name not in choices and (missing := explain_missing(group, name)) is not None:
            raise UserError(f"{location}: {missing}")
        if name not in choices:
            raise UserError(
                f"{location}: {group}={name}: there is no such choice; "
                f"{suggest_nearest(name, choices)}, and what is outside the project is found by "
                "--config-dir FOLDER"
            )
        names = ("choice", "_target_")
        settings = {str(key): value for key, value in saved.items() if key not in names}
        return cls(group, name, settings)

    @property
    def layer(self) -> Layer:
        """Return the last layer that sets the choice or any setting."""
        return max(self.layers.values(), key=LAYERS.index, default="default")

    def find_layer(self, key: str) -> Layer:
        """Return the layer that sets a setting."""
        return self.layers.get(key, "default")

    @property
    def path(self) -> str:
        """Return the import path of the constructor."""
        assert self.choice is not None, f"{self.group} is empty"
        return list_constructors(self.group).get(self.choice, self.choice)

    @property
    def node(self) -> dict[str, Any]:
        """Return the group as a node of hydra."""
        return {"_target_": self.path, **self.settings} if self else dict(self.settings)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a setting, or `default` where the configuration leaves it to the constructor."""
        return self.settings.get(key, default)

    def with_settings(self, **changes: Any) -> GroupSpec:
        """Return the group with other settings."""
        return replace(self, settings={**self.settings, **changes})

    def drop_setting(self, key: str) -> GroupSpec:
        """Return the group with one setting left to the constructor's default."""
        return replace(
            self, settings={name: value for name, value in self.settings.items() if name != key}
        )

    def save(self) -> dict[str, Any]:
        """Return the group in its saved form, without what only a command sets."""
        saved = drop_command_only({self.group: self.settings})
        settings = saved.get(self.group, {})
        return {"choice": self.choice, **settings} if self and saved else settings

    def with_defaults(self) -> dict[str, Any]:
        """Return all settings, the constructor's defaults included."""
        defaults = {key.name: key.value for key in list_keys(self.path) if key.default is not None}
        return {**defaults, **self.settings}

    def named_by(self, origin: str | Path) -> GroupSpec:
        """Return the group as one whose settings a file holds."""
        layers = dict.fromkeys(("choice", *self.settings), RUN)
        return replace(self, layers=layers, file=str(origin))

    @property
    def origin(self) -> str | None:
        """Return the file that names what the group may load from the hub; None where the command
        names it.
        """
        names_download = any(
            self.get(key) is not None and self.find_layer(key) == RUN
            for key in list_downloaded(self.group)
        )
        return self.file if names_download else None

    def without_downloads(self) -> AbstractContextManager[None]:
        """Read what a file names from this machine alone; what the command names may be
        downloaded.
        """
        return without_downloads(self.origin)

    def load_constructor(self) -> Any:
        """Import the class or the function that the choice constructs; a yaml must name it."""
        find_group(self.path)
        module, _, name = self.path.rpartition(".")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(
                f"{self.group}={self.choice}: {self.path} cannot be imported ({error}); "
                "PYTHONPATH must name the folder of its module"
            ) from error

    def build(self, **runtime: Any) -> Any:
        """Construct what the choice names, after a check of the settings; return None for an
        empty group.
        """
        if not self:
            return None
        checked = check_node(self.group, self.node)
        settings = {key: value for key, value in checked.items() if key not in ("_target_", "init")}
        constructor = self.load_constructor()
        config_type = find_config_type(constructor)
        with self.without_downloads():
            arguments = (
                add_parts(constructor, settings)
                if config_type is None
                else {"config": config_type(**settings)}
            )
            return constructor(**{**arguments, **runtime})


def save_groups(nodes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nodes of hydra in the form that files hold, and other values unchanged."""
    return {
        key: GroupSpec.from_node(key, node).save()
        if isinstance(node, Mapping) and "_target_" in node
        else node
        for key, node in nodes.items()
    }


def build(node: Any, **runtime: Any) -> Any:
    """Construct what a node with a `_target_` names; return None for an empty node."""
    if not node or "_target_" not in node:
        assert not node or "choice" not in node, "what a file names is looked up first"
        return None
    return GroupSpec.from_node(find_group(str(node["_target_"])), node).build(**runtime)


def find_config_type(constructor: Any) -> Any:
    """Return the dataclass that a constructor takes as `config`, which holds its settings; None
    if it takes them directly.
    """
    parameter = inspect.signature(constructor).parameters.get("config")
    return (
        None
        if parameter is None
        else getattr(importlib.import_module(constructor.__module__), parameter.annotation)
    )


def to_containers(value: Any) -> Any:
    """Return settings as plain dictionaries and lists."""
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        return {str(key): to_containers(inner) for key, inner in value.items()}
    return [to_containers(inner) for inner in value] if isinstance(value, (list, tuple)) else value


# Checks


def check_config(config: Mapping[str, Any], allowed_keys: Iterable[str]) -> dict[str, Any]:
    """Return the resolved configuration as plain containers; raise a UserError for an unknown or
    missing key, or a value of the wrong type."""
    allowed_keys = list(allowed_keys)
    for key in map(str, config):
        if key not in allowed_keys:
            raise UserError(f"{key}: there is no such key; {suggest_nearest(key, allowed_keys)}")
    try:
        composed = config if OmegaConf.is_config(config) else OmegaConf.create(dict(config))
        plain: Any = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        where = str(error.full_key or "configuration")
        raise UserError(f"{where}: {str(error).splitlines()[0]}") from error
    for group, node in plain.items():
        if isinstance(node, dict) and "_target_" in node:
            plain[group] = check_node(str(group), node)
    return {str(key): value for key, value in plain.items()}


def check_node(group: str, node: Mapping[str, Any]) -> dict[str, Any]:
    """Check one group's settings against its constructor, and return them converted to the
    declared types.
    """
    target = str(node["_target_"])
    if find_choice(group, target) is None:
        raise UserError(
            f"{group}._target_={target}: no choice of this group names it; write {group}=CHOICE"
        )
    if not has_source(target):
        raise UserError(
            f"{group}={find_choice(group, target)}: {target} is not found; PYTHONPATH says where "
            "the folder of its module lies"
        )
    settings = settings_by_name(target)
    checked: dict[str, Any] = {"_target_": target}
    for name, value in node.items():
        if name == "init" and group == "drafter":
            checked[name] = value
        elif name != "_target_":
            checked[name] = check_value(group, name, value, settings)
    for name, key in settings.items():
        if key.default is None and name not in checked:
            raise UserError(f"{group}.{name}: it must be given, as in {group}.{name}=VALUE")
    return checked


def settings_by_name(target: str) -> dict[str, SettingKey]:
    """Return a constructor's settings: name -> setting."""
    return {key.name: key for key in list_keys(target)}


def check_value(group: str, name: str, value: Any, allowed_keys: Mapping[str, SettingKey]) -> Any:
    """Return a setting's value in its declared type; directives and numbers that are not finite
    raise a UserError.
    """
    full = f"{group}.{name}"
    if (
        name not in allowed_keys
        and (missing := explain_missing(f"{group}.", name, full)) is not None
    ):
        raise UserError(missing)
    if name not in allowed_keys:
        raise UserError(
            f"{full}: there is no such key; "
            f"{suggest_owner(group, name) or suggest_nearest(name, allowed_keys)}"
        )
    if value == "" and allowed_keys[name].default != "":
        raise UserError(f"{full}=: it is empty; write {full}=VALUE, or leave it out")
    if value == "???":
        raise UserError(f"{full}: it must be given, as in {full}=VALUE")
    order = next(find_directives(value, full), None)
    if order is not None:
        raise UserError(f"{order}; delete it")
    hint = allowed_keys[name].hint
    try:
        checked = TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        if (missing := explain_missing(full, str(value))) is not None:
            raise UserError(missing) from error
        raise UserError(
            f"{full}={shorten(value)}: {violation_text(error, hint)}{suggest_remedy(value, hint)}"
        ) from error
    if (remedy := find_converted_truth(value, checked)) is not None:
        raise UserError(f"{full}={shorten(value)}: {remedy} ({describe_type(hint)})")
    if not is_finite(checked):
        raise UserError(f"{full}={shorten(value)}: use a finite number")
    return checked


def check_overrides(schema: CommandSchema, words: list[str]) -> None:
    """Raise a UserError for the first override whose constructor does not have the setting, or
    whose value is wrong.

    References and sweeps are left to hydra, which alone can resolve them.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    choices = select_choices(schema, words)
    folders = conf_folders(words)
    parser = OverridesParser.create()
    for word in words:
        setting = re.fullmatch(r"(?:\+\+|\+)?(\w+)\.(\w+)=(.*)", word, re.DOTALL)
        if setting is None:
            continue
        group, name, value = setting.groups()
        path = choice_files(group, folders).get(choices.get(group, ""))
        target = schema.nodes.get(group) or (load_yaml(path).get("_target_") if path else None)
        if target is None or not list_keys(target) or (group, name) == ("drafter", "init"):
            continue
        try:
            override = parser.parse_override(f"{group}.{name}={value}")
            if override.is_sweep_override():
                continue
            given: Any = override.value()
        except (HydraException, ValueError, RecursionError):
            given = value
        if "${" not in value:
            check_value(group, name, given, settings_by_name(target))


def shorten(value: Any) -> str:
    """Return a value for a message, without what follows the first characters of a very long
    one.
    """
    text = str(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}.."


def find_converted_truth(value: Any, checked: Any) -> str | None:
    """Return what to write where a check has turned a truth value into a number, or a number
    into a truth value.
    """
    if isinstance(value, Mapping) and isinstance(checked, Mapping):
        pairs = [(entry, checked.get(key)) for key, entry in value.items()]
    elif isinstance(value, (list, tuple)) and isinstance(checked, (list, tuple)):
        pairs = list(zip(value, checked))
    elif (
        isinstance(value, bool)
        and isinstance(checked, (int, float))
        and not isinstance(checked, bool)
    ):
        return "write a number"
    elif (
        isinstance(checked, bool)
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
    ):
        return "write true or false"
    else:
        return None
    return next(
        filter(None, (find_converted_truth(entry, result) for entry, result in pairs)), None
    )


def is_finite(value: Any) -> bool:
    """Tell whether all numbers in a value are finite."""
    if isinstance(value, Mapping):
        return all(map(is_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def violation_text(error: ValidationError, hint: Any) -> str:
    """Describe what is wrong with a value: the bounds that it violates, or else the type that it
    needs.
    """
    first = error.errors()[0]
    if first["type"] in BOUND_TEXTS:
        return BOUND_TEXTS[first["type"]].format(
            **{key: f"{bound:.10g}" for key, bound in first["ctx"].items()}
        )
    if first["type"] == "predicate_failed":
        return f"use {find_predicate(hint).__doc__}"
    return f"{first['msg'][0].lower() + first['msg'][1:]} ({describe_type(hint)})"


def find_predicate(hint: Any) -> Any:
    """Return our predicate that a value must satisfy."""
    return next(note.func for note in getattr(hint, "__metadata__", ()) if hasattr(note, "func"))


def describe_type(hint: Any) -> str:
    """Format a type for a message, without its bounds."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return describe_type(typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(describe_type, typing.get_args(hint)))
    if hint is types.NoneType:
        return "null"
    if origin in (tuple, list, dict):
        return f"{origin.__name__}[{', '.join(map(describe_type, typing.get_args(hint)))}]"
    return (
        hint.__name__
        if isinstance(hint, type) and origin is None
        else str(hint).replace("typing.", "")
    )


def suggest_owner(group: str, key: str) -> str:
    """Name the choices of a group that have this setting; an empty text if none has it."""
    owners_of_key = find_owners(group, key)
    return f"it is a setting of {group}={', '.join(owners_of_key)}" if owners_of_key else ""


def suggest_remedy(value: Any, hint: Any) -> str:
    """Say how to correct a value of the wrong type, if that is clear."""
    if value == "None" and "null" in describe_type(hint):
        return "; write null"
    if isinstance(value, str) and re.fullmatch(r"[-+]?[\d.,_]+\s*[A-Za-z%]+", value):
        return "; write a plain number, without a unit"
    return ""


def find_directives(content: Any, key_path: str = "") -> Iterator[str]:
    """Yield each directive (an instruction instead of data) in a file's content, as a sentence
    without its end.
    """
    if key_path.count(".") > MAX_NESTING:
        yield f"{key_path.split('.')[0]} is nested too deeply"
    elif isinstance(content, (dict, list)) and len(content) > MAX_VALUES:
        yield (
            f"{key_path or 'the file'} has {len(content)} values, and no setting has more "
            f"than {MAX_VALUES}"
        )
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from _check_key(str(key), value, f"{key_path}.{key}" if key_path else str(key))
    elif isinstance(content, list):
        for number, value in enumerate(content):
            yield from find_directives(value, f"{key_path}.{number}")
    elif isinstance(content, str) and "${" in content:
        yield (
            f"{key_path} refers to other values by ${{..}}, and a file holds only values of its own"
        )


def _check_key(key: str, value: Any, key_path: str) -> Iterator[str]:
    if key in HYDRA_DIRECTIVES:
        yield f"{key_path} is an order to construct something, and a file holds only data"
    elif key in REMOTE_CODE_KEYS and _references_code(key, value):
        yield f"{key_path} leads to code that would be run, and a file cannot allow that"
    elif key.endswith("attn_implementation") and "/" in str(value):
        yield f"{key_path}={value} leads to code on the hub, and a file cannot allow that"
    elif key == "parent_library" and value and not str(value).startswith("transformers"):
        yield (
            f"{key_path}={value} leads to a package that would be imported, and a file cannot "
            "allow that"
        )
    else:
        yield from find_directives(value, key_path)


def _references_code(key: str, value: Any) -> bool:
    # of speculators: its class is in the library
    own = key == "auto_map" and isinstance(value, dict) and value.keys() == {""}
    return bool(value) and not own
