"""Tree builders: how many nodes are drafted, and where. The names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import TreeBuilder
    from .chain import Chain
    from .dynamic import Eagle2
    from .fixed import Static
    from .measured import Auto
    from .rollout import Rollout

__all__ = [
    "Auto",
    "Chain",
    "Eagle2",
    "Rollout",
    "Static",
    "TreeBuilder",
]

_MODULES = {
    "Auto": "measured",
    "Chain": "chain",
    "Eagle2": "dynamic",
    "Rollout": "rollout",
    "Static": "fixed",
    "TreeBuilder": "base",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
