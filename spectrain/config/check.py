"""Checks of settings against their constructors, whose sources are parsed and not imported."""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from spectrain.errors import RunError, UserError, explain_missing_module, suggest_nearest

from .choices import (
    FOLDER_KEYS,
    CommandSchema,
    choice_files,
    choice_name,
    find_owners,
    list_constructors,
    load_yaml,
    select_choices,
)
from .grouped import flatten_settings
from .missing import explain_missing
from .signatures import SettingKey, has_source, list_keys

# Messages for numbers out of bounds, by pydantic's name of the error.
BOUND_TEXTS = {
    "greater_than_equal": "use {ge} or more",
    "greater_than": "use more than {gt}",
    "less_than_equal": "use {le} or less",
    "less_than": "use less than {lt}",
}
# What a value of a plain type is, in messages.
VALUE_WORDS: dict[Any, str] = {
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    str: "a text",
    types.NoneType: "null",
}
# Keys that hydra obeys.
HYDRA_DIRECTIVES = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")
# Keys of transformers that refer to code stored with the weights.
REMOTE_CODE_KEYS = ("auto_map", "trust_remote_code")
# What TrainingArguments of transformers calls settings, and their names here.
OTHER_NAMES = {
    "learning_rate": "lr",
    "num_train_epochs": "epochs",
    "gradient_accumulation_steps": "accumulate",
    "max_grad_norm": "clip",
    "logging_steps": "log_every",
    "save_steps": "save_every",
    "eval_steps": "eval_every",
    "save_total_limit": "keep_checkpoints",
    "warmup_ratio": "warmup",
    "resume_from_checkpoint": "resume",
}
# Of a value in a message.
MAX_SHOWN_CHARACTERS = 300
# Values of a list or a group in a file; the longest are the nodes of a fixed tree, 4096.
MAX_VALUES = 10_000
# No setting counts further; what it counts with has integers of 64 bits.
MAX_INTEGER = 2**63 - 1
# Levels of nested settings.
MAX_NESTING = 64


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
        if missing := explain_missing_module(error):
            raise RunError(missing) from error
        where = str(error.full_key or "configuration")
        raise UserError(f"{where}: {str(error).splitlines()[0]}") from error
    for group, node in plain.items():
        if isinstance(node, dict) and "_target_" in node:
            plain[group] = check_node(str(group), node)
    return {str(key): value for key, value in plain.items()}


def check_node(group: str, node: Mapping[str, Any]) -> dict[str, Any]:
    """Check a node of one group, whose settings may stand in parts; return it with its settings by
    name, converted to the declared types.
    """
    target = str(node["_target_"])
    settings = flatten_settings(group, node, target)
    settings.pop("_target_", None)
    return {"_target_": target, **check_settings(group, choice_name(group, node), settings)}


def check_settings(group: str, choice: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Check the settings of a group's choice against its constructor, and return them converted to
    the declared types.
    """
    target = list_constructors(group).get(choice)
    if target is None:
        raise UserError(
            f"{group}._target_={choice}: no choice of this group names it; write {group}=CHOICE"
        )
    if not has_source(target):
        raise UserError(
            f"{group}={choice}: {target} is not found; PYTHONPATH says where "
            "the folder of its module lies"
        )
    allowed_keys = settings_by_name(target)
    checked: dict[str, Any] = {}
    for name, value in settings.items():
        if name == "init" and group == "drafter":
            checked[name] = value
        else:
            key = find_setting(group, name, allowed_keys, value)
            checked[name] = check_value(f"{group}.{name}", value, key)
    for name, key in allowed_keys.items():
        if key.default is None and name not in checked:
            raise UserError(f"{group}.{name}: it must be given, as in {group}.{name}=VALUE")
    return checked


def settings_by_name(target: str) -> dict[str, SettingKey]:
    """Return a constructor's settings: name -> setting."""
    return {key.name: key for key in list_keys(target)}


def find_setting(
    group: str, name: str, allowed_keys: Mapping[str, SettingKey], value: Any = None
) -> SettingKey:
    """Return the setting with this name; raise a UserError where there is none, which names the
    package that has this value of it, if one has.
    """
    if name in allowed_keys:
        return allowed_keys[name]
    full = f"{group}.{name}"
    missing = explain_missing(full, str(value)) or explain_missing(f"{group}.", name, full)
    if missing is not None:
        raise UserError(missing)
    owners = ", ".join(find_owners(group, name))
    ours = OTHER_NAMES.get(name)
    if owners:
        advice = f"it is a setting of {group}={owners}"
    elif ours in allowed_keys:
        advice = f"write {group}.{ours}"
    else:
        advice = suggest_nearest(name, [*allowed_keys])
    raise UserError(f"{full}: there is no such key; {advice}")


def check_value(full: str, value: Any, key: SettingKey) -> Any:
    """Return the value of a setting, whose full name is GROUP.NAME, in its declared type;
    directives and numbers that are not finite raise a UserError.
    """
    if value == "" and key.default != "":
        raise UserError(f"{full}=: it is empty; write {full}=VALUE, or leave it out")
    if value == "???":
        raise UserError(f"{full}: it must be given, as in {full}=VALUE")
    order = next(find_directives(value, full), None)
    if order is not None:
        raise UserError(f"{order}; delete it")
    hint = key.hint
    try:
        checked = TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        if (missing := explain_missing(full, str(value))) is not None:
            raise UserError(missing) from error
        reason = suggest_remedy(value, hint).removeprefix("; ") or violation_text(error, hint)
        raise UserError(f"{full}={shorten(value)}: {reason}") from error
    if (remedy := find_converted_truth(value, checked)) is not None:
        raise UserError(f"{full}={shorten(value)}: {remedy} ({describe_type(hint)})")
    leaves = [*list_leaves(checked)]
    if not all(math.isfinite(leaf) for leaf in leaves if isinstance(leaf, float)):
        raise UserError(f"{full}={shorten(value)}: use a finite number")
    if any(abs(leaf) > MAX_INTEGER for leaf in leaves if isinstance(leaf, int)):
        raise UserError(f"{full}={shorten(value)}: use at most {MAX_INTEGER}")
    return checked


def check_overrides(schema: CommandSchema, words: list[str]) -> None:
    """Raise a UserError for the first override whose constructor does not have the setting, or
    whose value is wrong.

    References and sweeps are left to hydra, which alone can resolve them.
    """
    choices = select_choices(schema, words)
    keys = {key.name: key for key in schema.keys}
    for word in words:
        setting = re.fullmatch(r"(?:\+\+|\+)?(?:(\w+)\.)?(\w+)=(.*)", word, re.DOTALL)
        if setting is None or "${" in setting[3]:
            continue
        group, name, value = setting.groups()
        if group is None:
            if name in keys:
                check_own_key(keys[name], value)
            continue
        path = choice_files(group).get(choices.get(group, ""))
        target = schema.nodes.get(group) or (load_yaml(path).get("_target_") if path else None)
        if target is None or not list_keys(target) or (group, name) == ("drafter", "init"):
            continue
        given = parse_value(value)
        if given is not SWEEP:
            key = find_setting(group, name, settings_by_name(target), given)
            check_value(f"{group}.{name}", given, key)
    check_recipe_fits(choices.get("recipe", ""), choices.get("drafter", ""))


def check_recipe_fits(recipe: str, drafter: str) -> None:
    """Raise a UserError where a recipe sets what a drafter that was chosen beside it does not
    have.
    """
    recipes = {name: load_yaml(path) for name, path in choice_files("recipe").items()}
    target = list_constructors("drafter").get(drafter)
    allowed_keys = {} if target is None else settings_by_name(target)
    # Nothing is known of a class whose module is not found; building it says so.
    if recipe not in recipes or not allowed_keys:
        return
    given = {*recipes[recipe].get("drafter", {})} - {*allowed_keys}
    if given:
        fitting = [
            name
            for name, content in recipes.items()
            if {"override /drafter": drafter} in content.get("defaults", ())
        ]
        remedy = f"write recipe={fitting[0]}" if fitting else "leave out recipe="
        raise UserError(
            f"drafter={drafter}: recipe={recipe} sets drafter.{min(given)}, which it does not "
            f"have; {remedy}"
        )


SWEEP = object()
"""The value of a word with several values."""


def parse_value(text: str) -> Any:
    """Return the value that hydra reads in a word, or else its text; SWEEP for several values."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(f"key={text}")
        return SWEEP if override.is_sweep_override() else override.value()
    except (HydraException, ValueError, RecursionError):
        return text


def check_own_key(key: SettingKey, text: str) -> None:
    """Raise a UserError where a setting of a command, which is in no group, has a value of another
    type. A number may name a folder.
    """
    value = parse_value(text)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is SWEEP or (is_number and key.name in FOLDER_KEYS):
        return
    expected = {bool: "true or false", int: "a whole number"}.get(key.hint)
    # Nothing converts these values, so a text that reads like one is refused too.
    if expected is not None and type(value) is not key.hint:
        remedy = suggest_remedy(value, key.hint)
        raise UserError(f"{key.name}={shorten(text)}: write {expected}{remedy}")
    check_value(key.name, value, key)


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


def list_leaves(value: Any) -> Iterator[Any]:
    """Yield the values in lists and mappings, however deeply they are nested."""
    if isinstance(value, Mapping):
        for part in value.values():
            yield from list_leaves(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from list_leaves(part)
    else:
        yield value


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
    words = describe_values(hint)
    if words is not None:
        return f"write {' or '.join(words)}"
    return f"{first['msg'][0].lower() + first['msg'][1:]} ({describe_type(hint)})"


def describe_values(hint: Any) -> list[str] | None:
    """Return in words what a setting of this type may be; None where that takes more than a few."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is typing.Annotated:
        return describe_values(arguments[0])
    if origin is typing.Literal:
        return [str(choice) for choice in arguments]
    if origin in (typing.Union, types.UnionType):
        parts = [describe_values(argument) for argument in arguments]
        words = [word for part in parts for word in part or ()]
        return None if None in parts else [*dict.fromkeys(words)]
    return [VALUE_WORDS[hint]] if hint in VALUE_WORDS else None


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


def suggest_remedy(value: Any, hint: Any) -> str:
    """Say how to correct a value of the wrong type, if that is clear."""
    if value == "None" and "null" in describe_type(hint):
        return "; write null"
    if isinstance(value, str) and re.search(r"\s[A-Za-z_][\w.]*=", value):
        return "; these are several settings in one pair of quotes, so quote them one by one"
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
