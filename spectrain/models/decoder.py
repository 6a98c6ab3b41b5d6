"""Where in a model its decoder layers are."""

import inspect
from typing import Any

from torch import nn

LISTS = ("layers", "h", "blocks")
"""What decoders call their layers."""


def decoder_of(model: Any) -> nn.Module:
    """The part of a model that holds its decoder layers and no output layer; inside a model of text and images, of the text."""
    decoder: nn.Module = model.get_decoder()
    if list_name(decoder) is not None:
        return decoder
    for found in (getattr(decoder, "model", None), getattr(model, "base_model", None)):
        if found is not None and list_name(found) is not None:
            return found
    return decoder


def list_name(decoder: nn.Module) -> str | None:
    """What a decoder calls the list of its layers; None where it has none."""
    return next((name for name in LISTS if isinstance(getattr(decoder, name, None), nn.ModuleList)), None)


def layers_of(decoder: nn.Module) -> nn.ModuleList | None:
    name = list_name(decoder)
    return None if name is None else getattr(decoder, name)


def cache_name(decoder: nn.Module) -> str:
    """What a decoder calls the cache that it is given."""
    return "cache_params" if "cache_params" in inspect.signature(decoder.forward).parameters else "past_key_values"


def asks_for(decoder: nn.Module, name: str) -> bool:
    """Whether a decoder knows an argument of this name."""
    return name in inspect.signature(decoder.forward).parameters
