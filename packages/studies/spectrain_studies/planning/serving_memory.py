"""The memory that a target's and a drafter's caches take while they are served.

A layer with attention keeps, for every token of a text, a key and a value of all its key-value
heads: 2 x heads x head size x bytes of a number. A sliding layer keeps the tokens of its window
alone, and a layer with latent attention what engines store of it, one compressed vector. A layer
with a recurrent state keeps that state, whatever the length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from spectrain.models.target import Target

SLIDING = ("sliding_attention", "chunked_attention", "local_attention")
STATEFUL = ("linear_attention", "mamba", "recurrent", "conv", "rwkv")


@dataclass(frozen=True)
class LayerCache:
    """The cache of a layer, in numbers of whatever type."""

    # Numbers of a token, and tokens that are kept at most; None keeps all.
    size: int
    window: int | None = None

    def count_numbers(self, context: int) -> int:
        """Return the numbers that a text of `context` tokens takes."""
        tokens = context if self.window is None else min(context, self.window)
        return self.size * tokens


@dataclass(frozen=True)
class ServingMemory:
    """The bytes that caches take for some users, each with a text of the same length."""

    users: int
    context: int
    # Of another token of one text, in the layers that keep all tokens.
    target_per_token: int
    # Of all texts, in the target and in the drafter.
    target: int
    drafter: int


def list_layer_caches(config: Any) -> list[LayerCache]:
    """Return the caches of a model's layers, from its (text) configuration."""
    count = int(config.num_hidden_layers)
    sliding = getattr(config, "sliding_window", None)
    # A model that lists no types, as Mistral 7B's first version, has the window in every layer.
    has_window = sliding and getattr(config, "use_sliding_window", True)
    default = ["sliding_attention" if has_window else "full_attention"] * count
    kinds = list(getattr(config, "layer_types", None) or default)
    window = sliding or getattr(config, "attention_chunk_size", None)
    caches = []
    for kind in kinds[:count]:
        if any(name in str(kind) for name in STATEFUL):
            caches.append(LayerCache(0))
        else:
            caches.append(
                LayerCache(count_token_numbers(config), window if kind in SLIDING else None)
            )
    return caches


def count_token_numbers(config: Any) -> int:
    """Return the numbers that a layer with attention keeps of a token; 0 for a model that has no
    attention.
    """
    latent = getattr(config, "kv_lora_rank", None)
    if latent is not None:
        return int(latent) + int(getattr(config, "qk_rope_head_dim", 0))
    heads = int(getattr(config, "num_attention_heads", None) or 0)
    if not heads:
        # Every layer keeps a state, whose size no text changes.
        return 0
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    size = getattr(config, "head_dim", None) or int(config.hidden_size) // heads
    return 2 * key_heads * int(size)


def list_drafter_caches(drafter: nn.Module) -> list[LayerCache]:
    """Return the caches of a drafter's attention: those of the small model inside it, or the
    outputs of its key and value projections, within the window of their attention.
    """
    models = [module for module in drafter.modules() if isinstance(module, Target)]
    if models:
        return [cache for model in models for cache in list_layer_caches(model.config)]
    return [
        LayerCache(size, getattr(attention, "window", None))
        for attention in drafter.modules()
        for name, module in attention.named_children()
        if name in ("k_proj", "v_proj")
        and isinstance(size := getattr(module, "out_features", None), int)
    ]


def plan_serving_memory(
    config: Any,
    drafter_caches: list[LayerCache],
    users: int,
    context: int,
    bytes_per_number: int = 2,
) -> ServingMemory:
    """Return what the caches of a target and a drafter take for `users` texts of `context` tokens
    each, with numbers of `bytes_per_number` bytes.
    """
    caches = list_layer_caches(config)
    per_text, drafter_per_text = (
        sum(cache.count_numbers(context) for cache in layers) for layers in (caches, drafter_caches)
    )
    return ServingMemory(
        users,
        context,
        bytes_per_number * sum(cache.size for cache in caches if cache.window is None),
        users * bytes_per_number * per_text,
        users * bytes_per_number * drafter_per_text,
    )
