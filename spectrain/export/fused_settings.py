"""What configurations say of a drafter that fuses layers of its target, wherever they say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spectrain.drafters.layers.eagle_layers import LAYER_KEYS


def read_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary embedding as `rope_parameters` says it, wherever a configuration keeps it."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    theta = config.get("rope_theta")
    rope.setdefault("rope_theta", 10000.0 if theta is None else theta)
    return rope


def flat_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """The same as flat configurations say it."""
    plain = set(rope) <= {"rope_type", "rope_theta"} and rope.get("rope_type") == "default"
    scaling = None if plain else {key: value for key, value in rope.items() if key != "rope_theta"}
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}


@dataclass
class FusedConfig:
    """A drafter's settings as a layout's config.json says them, in our terms."""

    layer_config: dict[str, Any]  # a Llama configuration
    layers: list[int] | None  # fused, the residual stream entering them; None where the file leaves it to the engine
    variants: dict[str, bool]
    draft_vocab_size: int | None

    @property
    def width(self) -> int:
        return int(self.layer_config["hidden_size"])

    @property
    def num_layers(self) -> int:
        return int(self.layer_config.get("num_hidden_layers") or 1)

    @property
    def attention_kinds(self) -> set[str]:
        """How its layers attend: sliding_attention, full_attention or, where they differ, both."""
        return set(self.layer_config.get("layer_types") or ["full_attention"])

    @property
    def window(self) -> int | None:
        """How many positions back its tokens see."""
        return int(self.layer_config["sliding_window"]) if self.attention_kinds == {"sliding_attention"} else None

    @property
    def architecture(self) -> dict[str, Any]:
        """What the constructor of our class takes: everything said but variants that are off."""
        heads = self.layer_config["num_attention_heads"]
        whole = {"head_dim": self.width // heads, "num_key_value_heads": heads, "rms_norm_eps": 1e-6, **self.layer_config}
        whole["head_dim"] = whole["head_dim"] or self.width // heads
        whole["num_key_value_heads"] = whole["num_key_value_heads"] or heads
        whole["rope_parameters"] = read_rope(self.layer_config)
        return {key: whole[key] for key in LAYER_KEYS if key in whole} | {k: True for k, on in self.variants.items() if on}
