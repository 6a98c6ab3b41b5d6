"""Train drafters for speculative decoding, and measure their speedup.

The Python interface loads on first use: the names in `__all__`, and `__version__`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .config.environment import let_threads_sleep

if TYPE_CHECKING:
    from .cli.interface import PretrainedDrafter as Drafter
    from .cli.interface import evaluate, evaluate_server, generate, train
    from .cli.results import Answer, EvalResult, TrainResult
    from .models.target import Target
    from .output.logs import use_logging
    from .runs.callbacks import Callback

    __version__: str

__all__ = [
    "Answer",
    "Callback",
    "Drafter",
    "EvalResult",
    "Target",
    "TrainResult",
    "evaluate",
    "evaluate_server",
    "generate",
    "train",
    "use_logging",
]

# Before torch is imported.
let_threads_sleep()

_LAZY_EXPORTS = {
    "Target": ("models.target", "Target"),
    "Callback": ("runs.callbacks", "Callback"),
    "Drafter": ("cli.interface", "PretrainedDrafter"),
    "Answer": ("cli.results", "Answer"),
    "EvalResult": ("cli.results", "EvalResult"),
    "TrainResult": ("cli.results", "TrainResult"),
    "use_logging": ("output.logs", "use_logging"),
    **{
        name: ("cli.interface", name)
        for name in ("evaluate", "evaluate_server", "generate", "train")
    },
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("spectrain.output.version").read_version()
    if name not in _LAZY_EXPORTS:
        raise AttributeError(f"module 'spectrain' has no attribute {name!r}")
    module, there = _LAZY_EXPORTS[name]
    return getattr(import_module(f"spectrain.{module}"), there)
