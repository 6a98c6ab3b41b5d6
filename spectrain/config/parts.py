"""How a constructor takes its settings: as arguments, as one dataclass, or with parts that
installed packages add to it.

A constructor takes parts if its class names their entry points as `part_group`, and then gets them
as `parts`. A setting that both declare goes to both, and the part's declaration is the one that is
checked; one that several parts declare has the values of all of them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .installed import load_entry_points


def make_arguments(constructor: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a constructor, in the form in which it takes its settings."""
    if (config_type := find_config_type(constructor)) is not None:
        return {"config": config_type(**settings)}
    group = getattr(constructor, "part_group", None)
    if group is None:
        return dict(settings)
    kinds = [constructor, *load_entry_points(group)]
    own, *others = (
        {field.name: settings[field.name] for field in fields(kind) if field.name in settings}
        for kind in kinds
    )
    return {**own, "parts": [part(**chosen) for part, chosen in zip(kinds[1:], others)]}


def find_config_type(constructor: Any) -> Any:
    """Return the dataclass that a constructor takes as `config`, which holds its settings; None
    if it takes them directly.
    """
    parameter = inspect.signature(constructor).parameters.get("config")
    if parameter is None:
        return None
    return getattr(importlib.import_module(constructor.__module__), parameter.annotation)
