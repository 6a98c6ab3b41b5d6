"""The name by which a module of transformers takes its cache: it differs between releases and
between models.

Release 5.24 of transformers renamed `past_key_values` and `cache_params` to `cache`. It still takes
the old names until 5.40, with a warning, through a decorator that a signature does not show. The
code of model repositories keeps the older names.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

CACHE_ARGUMENTS = ("cache_params", "cache", "past_key_values")
"""The arguments by which models take their cache, and the fields of their outputs that hold it."""


def cache_argument(module: nn.Module) -> str:
    """Return the name of a module's argument for the cache, as far as its signature shows it.

    The name that a target uses is `Architecture.cache_argument`: an architecture can correct this
    one.
    """
    return next(
        (name for name in CACHE_ARGUMENTS if accepts_argument(module, name)), CACHE_ARGUMENTS[-1]
    )


def accepts_argument(module: nn.Module, name: str) -> bool:
    """Return whether the forward of a module has an argument of this name."""
    return name in inspect.signature(module.forward).parameters


def read_cache(output: Mapping[str, Any]) -> Any:
    """Return the cache in the output of a model."""
    return next(output[name] for name in CACHE_ARGUMENTS if name in output)


def drop_cache(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a layer without its cache, whatever its name."""
    return {name: value for name, value in arguments.items() if name not in CACHE_ARGUMENTS}
