"""Where a model has its decoder layers."""

import inspect
from typing import Any

from torch import nn

LAYER_LIST_NAMES = ("layers", "h", "blocks")
"""The attributes by which decoders name their layers."""


def find_decoder(model: Any) -> nn.Module:
    """Return the part of a model that holds the decoder layers but no output layer; in a multimodal model, that of the text."""
    decoder: nn.Module = model.get_decoder()
    if layer_list_name(decoder) is not None:
        return decoder
    for found in (getattr(decoder, "model", None), getattr(model, "base_model", None)):
        if found is not None and layer_list_name(found) is not None:
            return found
    return decoder


def layer_list_name(decoder: nn.Module) -> str | None:
    """Return the attribute of a decoder that lists its layers; None where it has none."""
    return next((name for name in LAYER_LIST_NAMES if isinstance(getattr(decoder, name, None), nn.ModuleList)), None)


def find_layers(decoder: nn.Module) -> nn.ModuleList | None:
    name = layer_list_name(decoder)
    return None if name is None else getattr(decoder, name)


def cache_argument(decoder: nn.Module) -> str:
    """Return the name of the decoder argument for the cache."""
    return "cache_params" if "cache_params" in inspect.signature(decoder.forward).parameters else "past_key_values"


def accepts_argument(decoder: nn.Module, name: str) -> bool:
    """Return whether the forward of a decoder has an argument of this name."""
    return name in inspect.signature(decoder.forward).parameters
