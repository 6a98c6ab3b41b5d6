"""Construction of objects from settings: only what a choice names, with settings that are checked first."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import OmegaConf

from spectrain.errors import UserError

from .check import check_node
from .choices import find_choice, find_group


def register_resolvers(device: str = "auto") -> None:
    """Register `${cpu_gpu:A,B}`: A on a machine without a GPU and B on one with a GPU, or according to `device`."""
    has_gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
    OmegaConf.register_new_resolver("cpu_gpu", lambda cpu, gpu: gpu if has_gpu else cpu, replace=True)


def build(node: Any, **runtime: Any) -> Any:
    """Construct what a group's settings name, after a check of the settings; None for an empty group."""
    if not node or "_target_" not in node:
        assert not node or "choice" not in node, "what a file names is looked up first"
        return None
    plain = _to_containers(node)
    checked = check_node(find_group(str(plain["_target_"])), plain)
    settings = {key: value for key, value in checked.items() if key not in ("_target_", "init")}
    constructor = import_constructor(checked)
    config_type = find_config_type(constructor)
    return constructor(**{**(settings if config_type is None else {"config": config_type(**settings)}), **runtime})


def find_config_type(constructor: Any) -> Any:
    """Return the dataclass that a constructor takes as `config`, which holds its settings; None if it takes them directly."""
    parameter = inspect.signature(constructor).parameters.get("config")
    return None if parameter is None else getattr(importlib.import_module(constructor.__module__), parameter.annotation)


def import_constructor(node: Mapping[str, Any]) -> Any:
    """Import the class or function that a group's choice constructs; a yaml must name it."""
    find_group(str(node["_target_"]))
    return _import_name(str(node["_target_"]))


def _import_name(target: str) -> Any:
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        group = find_group(target)
        raise UserError(
            f"{group}={find_choice(group, target)}: {target} cannot be imported ({error}); PYTHONPATH says "
            f"where its module lies"
        ) from error


def settings_with_defaults(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of one group, defaults included."""
    constructor = import_constructor(node)
    parameters = inspect.signature(find_config_type(constructor) or constructor).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    return {**defaults, **{str(key): value for key, value in node.items() if not str(key).startswith("_")}}


def _to_containers(value: Any) -> Any:
    """Return settings as plain containers; strings are not parsed."""
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        return {str(key): _to_containers(inner) for key, inner in value.items()}
    return [_to_containers(inner) for inner in value] if isinstance(value, list) else value
