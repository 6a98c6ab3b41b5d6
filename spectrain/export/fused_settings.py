"""The settings of a drafter that fuses layers of its target, as configurations hold them, whatever the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spectrain.drafters.layers.eagle_layers import LAYER_KEYS


def read_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's rotary embedding in the form of `rope_parameters`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    theta = config.get("rope_theta")
    rope.setdefault("rope_theta", 10000.0 if theta is None else theta)
    return rope


def flat_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Return a rotary embedding in the form of flat configurations."""
    is_default = set(rope) <= {"rope_type", "rope_theta"} and rope.get("rope_type") == "default"
    scaling = None if is_default else {key: value for key, value in rope.items() if key != "rope_theta"}
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}


@dataclass
class FusedConfig:
    """A drafter's settings from a layout's config.json, in spectrain's terms."""

    layer_config: dict[str, Any]  # a Llama configuration
    layers: list[int] | None  # fused streams, by the layer that they enter; None for the engine's default
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
        """The attention kinds of its layers: sliding_attention, full_attention, or both."""
        return set(self.layer_config.get("layer_types") or ["full_attention"])

    @property
    def window(self) -> int | None:
        """The number of positions back that its layers attend to; None for all."""
        return int(self.layer_config["sliding_window"]) if self.attention_kinds == {"sliding_attention"} else None

    @property
    def architecture(self) -> dict[str, Any]:
        """The constructor's `architecture`, complete except for variants that are off."""
        heads = self.layer_config["num_attention_heads"]
        values = {"head_dim": self.width // heads, "num_key_value_heads": heads, "rms_norm_eps": 1e-6, **self.layer_config}
        values["head_dim"] = values["head_dim"] or self.width // heads
        values["num_key_value_heads"] = values["num_key_value_heads"] or heads
        values["rope_parameters"] = read_rope(self.layer_config)
        return {key: values[key] for key in LAYER_KEYS if key in values} | {
            k: True for k, is_on in self.variants.items() if is_on
        }
