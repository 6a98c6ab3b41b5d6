"""The settings of a drafter that fuses layers of its target, as configurations hold them, whatever the layout."""

from __future__ import annotations

from dataclasses import dataclass, field
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


def flatten_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with its nested groups merged into the top level."""
    return {**config, **(config.get("transformer_layer_config") or {}), **(config.get("dflash_config") or {})}


@dataclass
class FusedConfig:
    """A drafter's settings from a layout's config.json, in spectrain's terms."""

    layer_config: dict[str, Any]  # a Llama configuration
    layers: list[int] | None  # fused streams, by the layer that they enter; None for the engine's default
    variants: dict[str, bool]
    draft_vocab_size: int | None
    settings: dict[str, Any] = field(default_factory=dict)  # further settings of the family

    @property
    def width(self) -> int:
        return int(self.layer_config["hidden_size"])

    @property
    def vocab_size(self) -> int:
        """The size of the target's vocabulary."""
        return int(self.layer_config["vocab_size"])

    @property
    def draft_rows(self) -> int:
        """The number of tokens that it can draft."""
        return self.vocab_size if self.draft_vocab_size is None else min(self.draft_vocab_size, self.vocab_size)

    @property
    def has_draft_vocabulary(self) -> bool:
        return self.draft_rows < self.vocab_size

    @property
    def num_layers(self) -> int:
        return int(self.layer_config.get("num_hidden_layers") or 1)

    @property
    def window(self) -> int | None:
        """The number of positions back that its layers attend to; None for all."""
        kinds = set(self.layer_config.get("layer_types") or [])
        return int(self.layer_config["sliding_window"]) if kinds == {"sliding_attention"} else None

    @property
    def architecture(self) -> dict[str, Any]:
        """The constructor's `architecture`, complete except for variants that are off."""
        heads = self.layer_config["num_attention_heads"]
        values = {"head_dim": self.width // heads, "num_key_value_heads": heads, "rms_norm_eps": 1e-6, **self.layer_config}
        values["head_dim"] = values["head_dim"] or self.width // heads
        values["num_key_value_heads"] = values["num_key_value_heads"] or heads
        values["rope_parameters"] = read_rope(self.layer_config)
        variants = {name: True for name, is_on in self.variants.items() if is_on}
        return {key: values[key] for key in LAYER_KEYS if key in values} | variants
