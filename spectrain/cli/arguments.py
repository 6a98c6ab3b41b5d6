"""Checks of the arguments of the Python interface, whose errors say what to give."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spectrain.config.choices import list_config_groups, shipped_folders
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.runs.callbacks import Callback


def require_type(argument: str, value: object, kind: type, advice: str) -> None:
    """Raise a UserError where an argument names an object in place of being one, or is of another
    type.
    """
    if isinstance(value, kind):
        return
    if isinstance(value, (str, os.PathLike)):
        raise UserError(
            f"{argument}: this is the name {os.fspath(value)!r}; load it first, by {advice}"
        )
    raise UserError(f"{argument}: this is {describe(value)}; give what {advice} returns")


def require_target(target: object) -> None:
    """Raise a UserError where this is no loaded target."""
    require_type("target", target, Target, "spectrain.Target.from_pretrained")


def require_path(argument: str, value: object, example: str) -> None:
    """Raise a UserError where this is no path and no name."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise UserError(f"{argument}: this is {describe(value)}; give {example}")


def require_count(argument: str, value: object) -> None:
    """Raise a UserError where this is no whole number above 0."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{argument}={value!r}: give a whole number")
    if value < 1:
        raise UserError(f"{argument}={value}: use 1 or more")


def require_number(argument: str, value: object) -> None:
    """Raise a UserError where this is no number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise UserError(f"{argument}={value!r}: give a number")


def require_callbacks(callbacks: object) -> None:
    """Raise a UserError where these are no list of callbacks."""
    if not isinstance(callbacks, Sequence):
        raise UserError(
            f"callbacks: this is {describe(callbacks)}; give a list of spectrain.Callback"
        )
    for number, callback in enumerate(callbacks):
        if not isinstance(callback, Callback):
            raise UserError(
                f"callbacks[{number}]: this is {describe(callback)}; give an object of a class "
                "that derives from spectrain.Callback"
            )


def require_replaceable(directory: Path, names: Sequence[str]) -> None:
    """Raise a UserError where a folder holds other files than those that a new one replaces."""
    others = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    others = [name for name in others if name not in names]
    if others:
        raise UserError(
            f"{directory}: it holds other files, such as {others[0]}, which would be deleted; "
            "choose another folder"
        )


def describe(value: object) -> str:
    """Return what a wrong value is."""
    if value is None or value == "":
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"of type {type(value).__name__}"


def spread_groups(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield settings with a group that is given as a dictionary, such as trainer={"lr": 1e-3},
    key by key; "choice" in it is the group's choice.
    """
    groups = {*list_config_groups(shipped_folders()), "chat", "sampling", "regenerate"}
    for key, value in settings.items():
        if key not in groups or not isinstance(value, Mapping):
            yield key, value
            continue
        if "choice" in value:
            yield key, value["choice"]
        for name, inner in value.items():
            if name != "choice":
                yield f"{key}.{name}", inner
