"""Settings of one choice that come from several classes: its own, and parts that installed packages
add to it.

A constructor takes parts if its class names their entry points as `part_group`, and then gets them
as `parts`. A setting that both declare goes to both, and the part's declaration is the one that is
checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .installed import load_entry_points


def add_parts(constructor: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a constructor: its own settings and, if it takes parts, the parts
    built with theirs.
    """
    group = getattr(constructor, "part_group", None)
    if group is None:
        return dict(settings)
    parts = [part(**select_fields(part, settings)) for part in load_entry_points(group)]
    return {**select_fields(constructor, settings), "parts": parts}


def select_fields(kind: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a dataclass declares."""
    names = {field.name for field in fields(kind)}
    return {key: value for key, value in settings.items() if key in names}
