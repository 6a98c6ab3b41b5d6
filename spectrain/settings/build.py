"""What settings construct: only what a choice names, with settings checked before and given to it as they are."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import OmegaConf

from spectrain.errors import UserError

from .check import check_node
from .choices import choice_of, group_of


def register_resolvers(device: str = "auto") -> None:
    """`${cpu_gpu:A,B}` is A on a machine without a GPU and B on one with, or what a named `device` has."""
    has_gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
    OmegaConf.register_new_resolver("cpu_gpu", lambda cpu, gpu: gpu if has_gpu else cpu, replace=True)


def build(node: Any, **runtime: Any) -> Any:
    """Construct what one group names from its settings, checked, or give None where it is empty."""
    if not node or "_target_" not in node:
        assert not node or "choice" not in node, "what a file names is looked up first"
        return None
    plain = _plain(node)
    checked = check_node(group_of(str(plain["_target_"])), plain)
    settings = {key: value for key, value in checked.items() if key not in ("_target_", "init")}
    return constructor(checked)(**{**settings, **runtime})


def constructor(node: Mapping[str, Any]) -> Any:
    """What a group's choice constructs: a class or a function, which one of the yaml files names."""
    group_of(str(node["_target_"]))
    return _imported(str(node["_target_"]))


def _imported(target: str) -> Any:
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        group = group_of(target)
        raise UserError(
            f"{group}={choice_of(group, target)}: {target} cannot be imported ({error}); PYTHONPATH says where its module lies"
        ) from error


def settings_of(node: Mapping[str, Any]) -> dict[str, Any]:
    """One group's settings, defaults included."""
    parameters = inspect.signature(constructor(node)).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    return {**defaults, **{str(key): value for key, value in node.items() if not str(key).startswith("_")}}


def _plain(value: Any) -> Any:
    """Settings as plain containers; text is not looked into."""
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
