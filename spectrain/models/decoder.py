"""Where in a model its decoder layers are."""

import inspect
from typing import Any

from torch import nn

LAYER_LIST_NAMES = ("layers", "h", "blocks")
"""What decoders call their layers."""


def find_decoder(model: Any) -> nn.Module:
    """The part of a model that holds its decoder layers and no output layer; inside a model of text and images, of the text."""
    decoder: nn.Module = model.get_decoder()
    if layer_list_name(decoder) is not None:
        return decoder
    for found in (getattr(decoder, "model", None), getattr(model, "base_model", None)):
        if found is not None and layer_list_name(found) is not None:
            return found
    return decoder


def layer_list_name(decoder: nn.Module) -> str | None:
    """What a decoder calls the list of its layers; None where it has none."""
    return next((name for name in LAYER_LIST_NAMES if isinstance(getattr(decoder, name, None), nn.ModuleList)), None)


def find_layers(decoder: nn.Module) -> nn.ModuleList | None:
    name = layer_list_name(decoder)
    return None if name is None else getattr(decoder, name)


def cache_argument(decoder: nn.Module) -> str:
    """What a decoder calls the cache that it is given."""
    return "cache_params" if "cache_params" in inspect.signature(decoder.forward).parameters else "past_key_values"


def accepts_argument(decoder: nn.Module, name: str) -> bool:
    """Whether a decoder knows an argument of this name."""
    return name in inspect.signature(decoder.forward).parameters
