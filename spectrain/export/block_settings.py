"""What configurations say of a drafter that drafts whole blocks, wherever they say it. Size: H width of the drafter.

Our `blocks.N.` are `layers.N.` in every layout, and our `markov.` is `markov_head.`.
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
"""How names of tensors begin, ours and theirs."""


@dataclass
class BlockConfig(FusedConfig):
    """A block drafter's settings as a layout's config.json says them, in our terms."""

    block_size: int
    mask_token_id: int
    sample_from_anchor: bool
    causal: bool
    slot_window: int | None  # how many positions back a slot sees
    extra_settings: dict[str, Any]  # settings of what the family has beside DFlash's layers

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        return int(self.layer_config["vocab_size"])

    @property
    def has_draft_vocabulary(self) -> bool:
        return self.draft_rows < self.vocab_size

    @property
    def draft_rows(self) -> int:
        """Tokens that it drafts."""
        return self.vocab_size if self.draft_vocab_size is None else min(self.draft_vocab_size, self.vocab_size)

    @property
    def dflash_shapes(self) -> dict[str, tuple[int | None, ...]]:
        """The tensors that every DFlash has, under our names."""
        layer, width = self.architecture, self.width
        inner, head = layer["intermediate_size"], layer["head_dim"]
        queries, keys = layer["num_attention_heads"] * head, layer["num_key_value_heads"] * head
        of_a_block: dict[str, tuple[int | None, ...]] = {
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
            **{f"blocks.{n}.{name}.weight": shape for n in range(self.num_layers) for name, shape in of_a_block.items()},
        }


def native_name(name: str, prefixes: dict[str, str] = NAME_PREFIXES) -> str:
    """Our name of a tensor."""
    name = name.removeprefix("model.")
    return next((mine + name.removeprefix(their) for mine, their in prefixes.items() if name.startswith(their)), name)


def layout_name(name: str, prefixes: dict[str, str] = NAME_PREFIXES) -> str:
    """A tensor's name in a layout."""
    return next((their + name.removeprefix(mine) for mine, their in prefixes.items() if name.startswith(mine)), name)


def flatten_config(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with what it says in parts, all in one."""
    return {**config, **(config.get("transformer_layer_config") or {}), **(config.get("dflash_config") or {})}


def require_keys(config: dict[str, Any], keys: tuple[str, ...]) -> None:
    """A KeyError that names all that is missing."""
    missing = [key for key in (*keys, *LAYER_KEYS) if config.get(key) is None]
    if not any(config.get(key) for key in ("rope_theta", "rope_parameters", "rope_scaling")):
        missing.append("rope_theta")
    if missing:
        raise KeyError(", ".join(missing))


def drafter_settings(said: BlockConfig, own_embedding: bool) -> dict[str, Any]:
    """Of the drafter."""
    return {
        "block_size": said.block_size,
        "num_layers": said.num_layers,
        "layers": said.layers,
        "vocab_size": said.draft_rows,
        "sample_from_anchor": said.sample_from_anchor,
        "causal": said.causal,
        "window": said.slot_window,
        "mask_token_id": said.mask_token_id,
        "own_embedding": own_embedding,
        "architecture": said.architecture,
        **said.extra_settings,
    }


def qwen3_layer(drafter: DrafterCheckpoint) -> dict[str, Any]:
    """The layers of a drafter as a Qwen3 configuration."""
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
