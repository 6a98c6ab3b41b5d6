"""The settings of a drafter that fuses layers of its target, from a layout's config.json, and the
forms in which configurations hold them.

Sizes: H width of the drafter, V vocabulary of the target, Vd of the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from spectrain.config.build import GroupSpec
from spectrain.drafters.base import Drafter
from spectrain.drafters.layers.llama_layer import LAYER_KEYS
from spectrain.drafters.layers.target_kind import LATENT_KEYS, is_latent
from spectrain.errors import UserError, first_line
from spectrain.models.rope import RopeError, fit_to_head, read_rope
from spectrain.models.target import Target

from .layout import Shape
from .targets import make_meta_target

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
SIZE_KEYS: tuple[str, ...] = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
)


def layer_rope(architecture: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding of a drafter's layers as configurations hold it; raise
    UserError where it cannot be read.
    """
    try:
        rope = fit_to_head(read_rope(architecture), architecture["head_dim"])
    except RopeError as error:
        raise UserError(f"drafter.architecture.rope_parameters: {error}") from error
    if rope["rope_type"] == "longrope" and "attention_factor" in rope:
        # vLLM and SGLang read these keys, transformers the other.
        rope |= dict.fromkeys(("short_mscale", "long_mscale"), rope["attention_factor"])
    return rope


def flat_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Return a rotary embedding in the form of flat configurations."""
    is_default = set(rope) <= {"rope_type", "rope_theta"} and rope.get("rope_type") == "default"
    scaling = (
        None if is_default else {key: value for key, value in rope.items() if key != "rope_theta"}
    )
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def flatten_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with its nested groups merged into the top level."""
    return {
        **config,
        **(config.get("transformer_layer_config") or {}),
        **(config.get("dflash_config") or {}),
    }


@dataclass
class FusedConfig:
    """A drafter's settings from a layout's config.json, in spectrain's terms."""

    layer_config: dict[str, Any]  # a Llama configuration
    # fused streams, by the layer that they enter; None for the engine's default
    layers: list[int] | None
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
        return (
            self.vocab_size
            if self.draft_vocab_size is None
            else min(self.draft_vocab_size, self.vocab_size)
        )

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
        values = {
            "head_dim": self.width // heads,
            "num_key_value_heads": heads,
            "rms_norm_eps": 1e-6,
            **self.layer_config,
        }
        values["head_dim"] = values["head_dim"] or self.width // heads
        values["num_key_value_heads"] = values["num_key_value_heads"] or heads
        values["rope_parameters"] = fit_to_head(read_rope(self.layer_config), values["head_dim"])
        variants = {name: True for name, is_on in self.variants.items() if is_on}
        keys = (*LAYER_KEYS, *(LATENT_KEYS if is_latent(variants) else ()))
        return {key: values[key] for key in keys if key in values} | variants


def require_keys(config: dict[str, Any], keys: tuple[str, ...]) -> None:
    """Raise KeyError naming every missing key."""
    missing = [key for key in keys if config.get(key) is None]
    if missing:
        raise KeyError(", ".join(missing))


def fused_shapes(config: FusedConfig, spec: GroupSpec) -> dict[str, Shape]:
    """Return the shapes of the tensors of a fused drafter, under spectrain's names; raise
    ValueError where it cannot be built.

    Ids of layers and of the mask token shape nothing, so faults in them are left to other checks;
    so is the rotary embedding.
    """
    count = 3 if config.layers is None else len(config.layers)
    architecture = {
        key: value for key, value in config.architecture.items() if key != "rope_parameters"
    }
    if architecture.get("norm_before_fc"):
        # Both flags together are a fault with a check of its own.
        architecture.pop("fc_norm", None)
    neutral = {
        "layers": list(range(count)),
        "mask_token_id": 0,
        "own_embedding": False,
        "architecture": architecture,
    }
    # The drafter takes its width and its vocabulary from the target, and the sizes of its layers
    # from `architecture`.
    model_config = LlamaConfig(
        hidden_size=config.width,
        vocab_size=config.vocab_size,
        num_hidden_layers=count,
        intermediate_size=1,
        num_attention_heads=1,
    )
    try:
        changes = {key: value for key, value in neutral.items() if key in spec.settings}
        drafter = build_meta_drafter(spec.with_settings(**changes), make_meta_target(model_config))
    except Exception as error:  # settings of another project may raise anything
        raise ValueError(first_line(error)) from error
    return {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}


def build_meta_drafter(spec: GroupSpec, target: Target) -> Drafter:
    """Return the drafter of these settings on the device "meta", for its shapes."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        drafter: Drafter = spec.build(target=target)
    return drafter


def equal_when_rounded(first: Tensor, second: Tensor) -> bool:
    """Tell whether two tensors are equal after rounding the second to the first one's dtype."""
    return first.shape == second.shape and torch.equal(first, second.to(first.dtype))


def is_close_to(first: Tensor, second: Tensor) -> bool:
    """Tell whether two tensors are equal up to rounding to bfloat16."""
    return first.shape == second.shape and torch.allclose(
        first.float(), second.float(), rtol=2**-7, atol=1e-6
    )
