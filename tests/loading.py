"""The tiny target of the commands and tests that load it: a load checks the weights and reads a
tokenizer, and takes six times as long as a copy.
"""

import copy
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

import torch

from spectrain.models.target import Target

# what changes how it is loaded, or from what; such a load stays a load
SPECIAL = ("sharding", "network", "chat_template", "template_kwargs", "parts")


def load_once(load: Callable[..., Target]) -> Callable[..., Target]:
    """Return `load_tiny` with a cache: a load of the same type to the same device returns a copy
    of the first result, whose weights and tokenizer are its own.
    """
    loaded: dict[tuple[str, str], Target] = {}
    parameters = signature(load).parameters

    @wraps(load)
    def load_or_copy(*args: Any, **kwargs: Any) -> Target:
        settings = dict(zip(parameters, args)) | kwargs
        is_plain = settings.keys() <= parameters.keys() and not any(
            settings.get(key) and settings[key] != parameters[key].default for key in SPECIAL
        )
        if not is_plain:
            return load(*args, **kwargs)
        key = str(settings.get("dtype", "auto")), str(settings.get("device", "auto"))
        # What is made in inference mode could not be trained.
        with torch.inference_mode(False):
            if key not in loaded:
                loaded[key] = load(*args, **kwargs)
            return copy.deepcopy(loaded[key])

    return load_or_copy
