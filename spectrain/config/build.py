"""Construction of what groups of settings name: only what a yaml in conf/ names, with settings that are checked first."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from omegaconf import OmegaConf

from spectrain.errors import UserError

from .check import check_node
from .choices import choice_name, find_choice, find_group, list_constructors
from .signatures import list_keys


def register_resolvers(device: str = "auto") -> None:
    """Register `${cpu_gpu:A,B}`: A on a machine without a GPU and B on one with a GPU, or according to `device`."""
    has_gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
    OmegaConf.register_new_resolver("cpu_gpu", lambda cpu, gpu: gpu if has_gpu else cpu, replace=True)


@dataclass(frozen=True)
class GroupSpec:
    """One group of a configuration: its choice and its settings. It is falsy where the group is empty, as tracker=none."""

    group: str
    # Name of the yaml in conf/, or the import path of a constructor that no yaml names; None for an empty group.
    choice: str | None = None
    # The values that the configuration sets; everything else is the constructor's default.
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.choice is not None

    @classmethod
    def from_node(cls, group: str, node: Any) -> GroupSpec:
        """Read a node of hydra, with a `_target_` and settings, or an empty one."""
        plain = to_containers(node or {})
        settings = {key: value for key, value in plain.items() if key != "_target_"}
        return cls(group, choice_name(group, plain) if "_target_" in plain else None, settings)

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
        return replace(self, settings={name: value for name, value in self.settings.items() if name != key})

    def save(self) -> dict[str, Any]:
        """Return the group in its saved form. No file grants permission to run a target's code."""
        settings = {key: value for key, value in self.settings.items() if key != "trust_remote_code"}
        return {"choice": self.choice, **settings} if self else settings

    def with_defaults(self) -> dict[str, Any]:
        """Return all settings, the constructor's defaults included."""
        defaults = {key.name: key.value for key in list_keys(self.path) if key.default is not None}
        return {**defaults, **self.settings}

    def load_constructor(self) -> Any:
        """Import the class or the function that the choice constructs; a yaml must name it."""
        find_group(self.path)
        return _import_name(self.path)

    def build(self, **runtime: Any) -> Any:
        """Construct what the choice names, after a check of the settings; return None for an empty group."""
        if not self:
            return None
        checked = check_node(self.group, self.node)
        settings = {key: value for key, value in checked.items() if key not in ("_target_", "init")}
        constructor = self.load_constructor()
        config_type = find_config_type(constructor)
        return constructor(**{**(settings if config_type is None else {"config": config_type(**settings)}), **runtime})


def build(node: Any, **runtime: Any) -> Any:
    """Construct what a node with a `_target_` names; return None for an empty node."""
    if not node or "_target_" not in node:
        assert not node or "choice" not in node, "what a file names is looked up first"
        return None
    return GroupSpec.from_node(find_group(str(node["_target_"])), node).build(**runtime)


def find_config_type(constructor: Any) -> Any:
    """Return the dataclass that a constructor takes as `config`, which holds its settings; None if it takes them directly."""
    parameter = inspect.signature(constructor).parameters.get("config")
    return None if parameter is None else getattr(importlib.import_module(constructor.__module__), parameter.annotation)


def _import_name(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        group = find_group(path)
        raise UserError(
            f"{group}={find_choice(group, path)}: {path} cannot be imported ({error}); PYTHONPATH must name the folder of its "
            "module"
        ) from error


def to_containers(value: Any) -> Any:
    """Return settings as plain dictionaries and lists."""
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        return {str(key): to_containers(inner) for key, inner in value.items()}
    return [to_containers(inner) for inner in value] if isinstance(value, (list, tuple)) else value
