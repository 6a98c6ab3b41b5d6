"""A drafter that learns inside TRL's training by reinforcement learning: `DrafterCallback`."""

from typing import Any

from . import load_integration


def __getattr__(name: str) -> Any:
    # Python itself looks for names of this form, which say nothing about the package.
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(load_integration("trl"), name)
