"""Composed configurations, checked against the constructors they name: each default has one home, the constructor."""

import inspect
import re
import types
import typing
from collections.abc import Iterable
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, TypeAdapter, ValidationError

from spectrain.cli.overrides import owners
from spectrain.errors import RunError, UserError, nearest

PLAIN = (int, float, str, bool, type(None), list, tuple, dict)


def register_resolvers(device: str = "auto") -> None:
    """`${cpu_gpu:A,B}` is A on a machine without a GPU and B on one with, or what a named `device` has."""
    has_gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
    OmegaConf.register_new_resolver("cpu_gpu", lambda cpu, gpu: gpu if has_gpu else cpu, replace=True)


def check_config(config: DictConfig, known: Iterable[str]) -> DictConfig:
    """The resolved configuration; stops at an unknown key, a missing one or a value of the wrong type."""
    known = list(known)
    for key in map(str, config):
        if key not in known:
            raise UserError(f"{key}: there is no such key; {nearest(key, known)}")
    try:
        plain: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        where = str(error.full_key or "configuration")
        raise UserError(f"{where}: {str(error).splitlines()[0]}") from error
    for group, node in plain.items():
        if isinstance(node, dict) and "_target_" in node:
            plain[group] = check_node(str(group), node)
    return OmegaConf.create(plain)


def check_node(group: str, node: dict[str, Any]) -> dict[str, Any]:
    """One group's settings against the constructor that its `_target_` names, values converted to the declared types."""
    try:
        target = get_object(node["_target_"])
    except Exception as error:
        raise UserError(f"{group}._target_={node['_target_']}: it cannot be imported ({error})") from error
    parameters = inspect.signature(target).parameters
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target, _runtime_names(target))
    settable = {name: p for name, p in parameters.items() if _is_plain(hints.get(name))}
    checked = {"_target_": node["_target_"]}
    for key, value in node.items():
        if key in ("_target_", "_partial_", "_convert_", "init"):
            checked[key] = value
            continue
        if key not in settable:
            raise UserError(f"{group}.{key}: there is no such key; {elsewhere(group, key) or nearest(key, settable)}")
        if value == "???":
            raise UserError(f"{group}.{key}: it must be given, as in {group}.{key}=VALUE")
        try:
            adapter = TypeAdapter(hints[key], config=ConfigDict(arbitrary_types_allowed=True))
            checked[key] = adapter.validate_python(value)
        except ValidationError as error:
            allowed = str(hints[key]).replace("typing.", "") if not inspect.isclass(hints[key]) else hints[key].__name__
            reason = error.errors()[0]["msg"]
            raise UserError(
                f"{group}.{key}={value}: {reason[0].lower() + reason[1:]} ({allowed}){plainly(value, allowed)}"
            ) from error
    for key, parameter in settable.items():
        if parameter.default is inspect.Parameter.empty and key not in checked:
            raise UserError(f"{group}.{key}: it must be given, as in {group}.{key}=VALUE")
    return checked


def elsewhere(group: str, key: str) -> str:
    """Which choices of a group have a setting that this one has not; empty where none has."""
    owners_of_key = owners(group, key)
    return f"it is a setting of {group}={', '.join(owners_of_key)}" if owners_of_key else ""


def plainly(value: Any, allowed: str) -> str:
    """How a value of the wrong type is mended, where that can be told."""
    if value == "None" and "None" in allowed:
        return "; write null"
    if isinstance(value, str) and re.fullmatch(r"[-+]?[\d.,_]+\s*[A-Za-z%]+", value):
        return "; write a plain number, without a unit"
    return ""


def settings_of(node: Any) -> dict[str, Any]:
    """One group's settings, defaults included."""
    parameters = inspect.signature(get_object(node["_target_"])).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    return {**defaults, **{str(key): value for key, value in node.items() if not str(key).startswith("_")}}


def build(node: Any, **runtime: Any) -> Any:
    """Instantiate one group, or give None where it is empty."""
    if not node or "_target_" not in node:
        return None
    plain = {key: value for key, value in dict(node).items() if key != "init"}
    try:
        return instantiate(OmegaConf.create(plain), _convert_="all", **runtime)
    except InstantiationException as error:
        if isinstance(error.__cause__, (UserError, RunError)):
            raise error.__cause__ from None
        raise


def _is_plain(hint: Any) -> bool:
    """Whether a parameter is a setting, as opposed to a runtime object such as the target."""
    if hint is None or hint is type(None):
        return True
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return all(_is_plain(part) for part in typing.get_args(hint))
    return origin in (list, tuple, dict, typing.Literal) or hint in PLAIN or hint is Any


def _runtime_names(target: Any) -> dict[str, Any]:
    """Names that annotations use under TYPE_CHECKING only; they stand for runtime objects."""
    module = inspect.getmodule(target)
    names = dict(vars(module)) if module else {}
    source = inspect.getsource(module) if module else ""
    for block in re.findall(r"if TYPE_CHECKING:\n((?:[ \t]+.*\n|\n)+)", source):
        for name in re.findall(r"import (.+)", block):
            for part in name.split(","):
                names.setdefault(part.split(" as ")[-1].strip(), object)
    return names
