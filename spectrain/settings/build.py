"""Composed configurations, checked against the constructors they name: each default has one home, the constructor."""

import importlib
import inspect
import re
import types
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, TypeAdapter, ValidationError

from spectrain.errors import UserError, nearest

from .choices import choice_of, group_of
from .saved import orders
from .schema import owners

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


def check_node(group: str, node: Mapping[str, Any]) -> dict[str, Any]:
    """One group's settings against the constructor that its choice names, values converted to the declared types."""
    target = str(node["_target_"])
    if choice_of(group, target) is None:
        raise UserError(f"{group}._target_={target}: no choice of this group names it; write {group}=CHOICE")
    settable = _settable(target)
    checked: dict[str, Any] = {"_target_": target}
    for key, value in node.items():
        if key == "_target_":
            continue
        if key == "init" and group == "drafter":
            checked[key] = value
            continue
        if key not in settable:
            raise UserError(f"{group}.{key}: there is no such key; {elsewhere(group, key) or nearest(key, settable)}")
        if value == "???":
            raise UserError(f"{group}.{key}: it must be given, as in {group}.{key}=VALUE")
        checked[key] = _converted(f"{group}.{key}", value, settable[key][0])
    for key, (_, required) in settable.items():
        if required and key not in checked:
            raise UserError(f"{group}.{key}: it must be given, as in {group}.{key}=VALUE")
    return checked


def _converted(name: str, value: Any, hint: Any) -> Any:
    """A value as the declared type has it; nothing in it is an order."""
    order = next(orders(value, name), None)
    if order is not None:
        raise UserError(f"{order}; delete it")
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except ValidationError as error:
        raise UserError(f"{name}={value}: {_reason(error, hint)}{plainly(value, str(hint))}") from error


def _reason(error: ValidationError, hint: Any) -> str:
    """What is wrong with a value: in our words where a constraint of ours is broken, else the type that it should have."""
    first = error.errors()[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    allowed = str(hint).replace("typing.", "") if not inspect.isclass(hint) else hint.__name__
    return f"{first['msg'][0].lower() + first['msg'][1:]} ({allowed})"


@cache
def _settable(target: str) -> dict[str, tuple[Any, bool]]:
    """A constructor's settings, as opposed to runtime objects: name -> its type, and whether it must be given."""
    found = _imported(target)
    made = found.__init__ if inspect.isclass(found) else found
    hints = typing.get_type_hints(made, _runtime_names(found), include_extras=True)
    return {
        name: (hints.get(name, Any), parameter.default is inspect.Parameter.empty)
        for name, parameter in inspect.signature(found).parameters.items()
        if _is_plain(hints.get(name))
    }


def constructor(node: Mapping[str, Any]) -> Any:
    """What a group's choice constructs: a class or a function, which one of the yaml files names."""
    group_of(str(node["_target_"]))
    return _imported(str(node["_target_"]))


@cache
def _imported(target: str) -> Any:
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"{group_of(target)}={choice_of(group_of(target), target)}: {target} cannot be imported ({error}); PYTHONPATH says "
            "where its module lies"
        ) from error


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


def settings_of(node: Mapping[str, Any]) -> dict[str, Any]:
    """One group's settings, defaults included."""
    parameters = inspect.signature(constructor(node)).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    return {**defaults, **{str(key): value for key, value in node.items() if not str(key).startswith("_")}}


def build(node: Any, **runtime: Any) -> Any:
    """Construct what one group names from its settings, checked, or give None where it is empty."""
    if not node or "_target_" not in node:
        assert not node or "choice" not in node, "what a file names is looked up first"
        return None
    plain = _plain(node)
    checked = check_node(group_of(str(plain["_target_"])), plain)
    settings = {key: value for key, value in checked.items() if key not in ("_target_", "init")}
    return constructor(checked)(**settings, **runtime)


def _plain(value: Any) -> Any:
    """Settings as plain containers; text is not looked into."""
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _is_plain(hint: Any) -> bool:
    """Whether a parameter is a setting, as opposed to a runtime object such as the target."""
    if hint is None or hint is type(None):
        return True
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _is_plain(typing.get_args(hint)[0])
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
