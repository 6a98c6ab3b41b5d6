"""Groups of settings, and construction of what they name. Only what a yaml in conf/ names is
constructed.

What composes and checks settings is imported where settings are composed or built, so that targets
and drafters which are made in Python need neither.
"""

from __future__ import annotations

import importlib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from spectrain.errors import UserError, suggest_nearest

from .choices import (
    choice_name,
    find_group,
    list_constructors,
)
from .command_only import drop_command_only, names_download, without_downloads
from .grouped import flatten_settings, group_settings
from .missing import explain_missing
from .parts import make_arguments
from .signatures import list_keys

Layer = Literal["default", "config", "recipe", "run", "file", "command"]
# Who sets a value; a later layer replaces what an earlier one set. "default" is the constructor's,
# "config" is what conf/ chooses, "run" is what a run folder or a drafter directory
# holds, and "file" is a settings file that the command names.
LAYERS: tuple[Layer, ...] = typing.get_args(Layer)
RUN: Layer = "run"
FILE_LAYERS: tuple[Layer, ...] = (RUN, "file")


def register_resolvers(device: str = "auto") -> None:
    """Let hydra find the choices of installed packages and what `${cpu_gpu:A,B}` and
    `${embedded:A}` stand for: A on a machine without a GPU and B on one with a GPU, or according to
    `device`; A of the embedded conversations, and null of data that the user names."""
    from omegaconf import OmegaConf

    from .search_path import register_search_path

    def choose(cpu: Any, gpu: Any) -> Any:
        # A command that only reads files has no such value, and does without torch.
        import torch

        return gpu if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else cpu

    register_search_path()
    OmegaConf.register_new_resolver("cpu_gpu", choose, replace=True)
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
    # The file or the folder of the layer "run" or "file".
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
        settings = flatten_settings(group, plain)
        settings.pop("_target_", None)
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
                "--config-dir FOLDER, or by installing its package"
            )
        names = ("choice", "_target_")
        settings = {str(key): value for key, value in saved.items() if key not in names}
        return cls(group, name, flatten_settings(group, settings, choices[name]))

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

    def with_settings(self, **changes: Any) -> GroupSpec:
        """Return the group with other settings."""
        return replace(self, settings={**self.settings, **changes})

    def drop_setting(self, key: str) -> GroupSpec:
        """Return the group with one setting left to the constructor's default."""
        return replace(
            self, settings={name: value for name, value in self.settings.items() if name != key}
        )

    def save(self) -> dict[str, Any]:
        """Return the group in its saved form, settings by part and without what only a command
        sets.
        """
        saved = drop_command_only({self.group: self.settings})
        settings = saved.get(self.group, {})
        if self:
            settings = group_settings(settings, self.path)
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
        of_file = {
            key: value
            for key, value in self.settings.items()
            if self.find_layer(key) in FILE_LAYERS
        }
        return self.file if names_download(self.group, of_file) else None

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
        from .check import check_settings

        if self.choice is None:
            return None
        settings = check_settings(self.group, self.choice, self.settings)
        # Where a training begins is no setting of a drafter.
        settings.pop("init", None)
        constructor = self.load_constructor()
        with without_downloads(self.origin):
            return constructor(**{**make_arguments(constructor, settings), **runtime})


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


def to_containers(value: Any) -> Any:
    """Return settings as plain dictionaries and lists."""
    from omegaconf import OmegaConf

    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        return {str(key): to_containers(inner) for key, inner in value.items()}
    return [to_containers(inner) for inner in value] if isinstance(value, (list, tuple)) else value
