"""The settings of a block drafter as configurations hold them, whatever the layout. Size: H width of the drafter.

Spectrain's `blocks.N.` are `layers.N.` in every layout, and its `markov.` is `markov_head.`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .eagle3 import drafter_layer_config
from .fused_settings import FusedConfig
from .layout import DrafterCheckpoint

LAYER_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size",
)  # fmt: skip
NAME_PREFIXES = {"blocks.": "layers.", "markov.": "markov_head."}
"""Prefix of a tensor's name in spectrain -> in a layout."""


@dataclass
class BlockConfig(FusedConfig):
    """A block drafter's settings from a layout's config.json, in spectrain's terms."""

    block_size: int
    mask_token_id: int
    sample_from_anchor: bool
    causal: bool
    slot_window: int | None  # positions back that a slot attends to; None for all
    extra_settings: dict[str, Any]  # the family's own settings

    @property
    def vocab_size(self) -> int:
        """The size of the target's vocabulary."""
        return int(self.layer_config["vocab_size"])

    @property
    def has_draft_vocabulary(self) -> bool:
        return self.draft_rows < self.vocab_size

    @property
    def draft_rows(self) -> int:
        """The number of tokens that it can draft."""
        return self.vocab_size if self.draft_vocab_size is None else min(self.draft_vocab_size, self.vocab_size)

    @property
    def dflash_shapes(self) -> dict[str, tuple[int | None, ...]]:
        """The shapes of the tensors that every DFlash has, under spectrain's names."""
        layer, width = self.architecture, self.width
        inner, head = layer["intermediate_size"], layer["head_dim"]
        queries, keys = layer["num_attention_heads"] * head, layer["num_key_value_heads"] * head
        block_shapes: dict[str, tuple[int | None, ...]] = {
            "input_layernorm": (width,), "post_attention_layernorm": (width,),
            "self_attn.q_proj": (queries, width), "self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, queries), "self_attn.q_norm": (head,), "self_attn.k_norm": (head,),
            "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
        }  # fmt: skip
        assert self.layers is not None
        return {
            "fc.weight": (width, len(self.layers) * width),
            "hidden_norm.weight": (width,),
            "norm.weight": (width,),
            **{f"blocks.{n}.{name}.weight": shape for n in range(self.num_layers) for name, shape in block_shapes.items()},
        }


def native_name(name: str, prefixes: dict[str, str] = NAME_PREFIXES) -> str:
    """Return spectrain's name of a tensor."""
    name = name.removeprefix("model.")
    return next((native + name.removeprefix(foreign) for native, foreign in prefixes.items() if name.startswith(foreign)), name)


def layout_name(name: str, prefixes: dict[str, str] = NAME_PREFIXES) -> str:
    """Return a layout's name of a tensor."""
    return next((foreign + name.removeprefix(native) for native, foreign in prefixes.items() if name.startswith(native)), name)


def flatten_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with its nested groups merged into the top level."""
    return {**config, **(config.get("transformer_layer_config") or {}), **(config.get("dflash_config") or {})}


def require_keys(config: dict[str, Any], keys: tuple[str, ...]) -> None:
    """Raise KeyError naming every missing key."""
    missing = [key for key in (*keys, *LAYER_KEYS) if config.get(key) is None]
    if not any(config.get(key) for key in ("rope_theta", "rope_parameters", "rope_scaling")):
        missing.append("rope_theta")
    if missing:
        raise KeyError(", ".join(missing))


def drafter_settings(config: BlockConfig, own_embedding: bool) -> dict[str, Any]:
    """Return the settings of spectrain's class."""
    return {
        "block_size": config.block_size,
        "num_layers": config.num_layers,
        "layers": config.layers,
        "vocab_size": config.draft_rows,
        "sample_from_anchor": config.sample_from_anchor,
        "causal": config.causal,
        "window": config.slot_window,
        "mask_token_id": config.mask_token_id,
        "own_embedding": own_embedding,
        "architecture": config.architecture,
        **config.extra_settings,
    }


def qwen3_layer(drafter: DrafterCheckpoint) -> dict[str, Any]:
    """Return the drafter's layers as a Qwen3 configuration."""
    count, window = drafter.drafter["num_layers"], drafter.drafter["window"]
    layer = {key: value for key, value in drafter_layer_config(drafter).items() if key != "mlp_bias"}
    return {
        **layer,
        "model_type": "qwen3",
        "num_hidden_layers": count,
        "layer_types": ["full_attention" if window is None else "sliding_attention"] * count,
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }
