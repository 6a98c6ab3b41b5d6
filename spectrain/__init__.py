"""Train drafters for speculative decoding, and measure their speedup.

The Python interface loads on first use: `Target`, `Drafter`, `Answer`, `train`, `generate`,
`evaluate` and `evaluate_server`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .config.environment import let_threads_sleep

if TYPE_CHECKING:
    from .cli.interface import Answer, evaluate, evaluate_server, generate, train
    from .cli.interface import PretrainedDrafter as Drafter
    from .models.target import Target

__all__ = ["Answer", "Drafter", "Target", "evaluate", "evaluate_server", "generate", "train"]

# Before torch is imported.
let_threads_sleep()

_LAZY_EXPORTS = {
    "Target": ("models.target", "Target"),
    "Drafter": ("cli.interface", "PretrainedDrafter"),
    **{
        name: ("cli.interface", name)
        for name in ("Answer", "evaluate", "evaluate_server", "generate", "train")
    },
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY_EXPORTS:
        raise AttributeError(f"module 'spectrain' has no attribute {name!r}")
    module, there = _LAZY_EXPORTS[name]
    return getattr(import_module(f"spectrain.{module}"), there)
