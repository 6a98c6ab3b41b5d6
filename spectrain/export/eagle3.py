"""EAGLE-3 as files hold it: its settings, and the names of its tensors.

Spectrain's tensor names have no prefix for the first layer (`fc.weight`,
`self_attn.q_proj.weight`); layouts have one. Later layers are `later.0.` and so on in spectrain,
`layers.1.` and so on in layouts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from spectrain.drafters.eagle3 import VARIANTS
from spectrain.drafters.layers.eagle_layers import default_layers, engine_layers
from spectrain.drafters.layers.llama_layer import LAYER_KEYS, llama_layer_settings
from spectrain.drafters.layers.target_kind import is_latent, latent_sizes
from spectrain.errors import UserError

from .fused import FusedFamily, FusedFiles, TensorNames
from .fused_config import HEAD, layer_rope
from .layout import DrafterCheckpoint, ExpectedTensors, MissingTarget
from .targets import TargetFiles

NUM_FUSED_LAYERS = 3
"""Layers of the target that SGLang's, llama.cpp's and OpenVINO's EAGLE-3 fuse."""
LAYER_PARTS = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn", "mlp")


class Eagle3Family(FusedFamily):
    """EAGLE-3, whose own embedding is a flag of its layer."""

    choice = "eagle3"

    def read_settings(self, source: FusedFiles, own_embedding: bool) -> dict[str, Any]:
        config = source.config
        settings = {
            "vocab_size": config.draft_rows,
            "layers": config.layers,
            "num_layers": config.num_layers,
        }
        if config.window is not None:
            settings["window"] = config.window
        return settings | self.layer_settings(source, own_embedding)

    def layer_settings(self, source: FusedFiles, own_embedding: bool) -> dict[str, Any]:
        """Return the settings that EAGLE-3 and P-EAGLE hold differently: the layer, and whether
        the embedding is its own.
        """
        flag = {"own_embedding": True} if own_embedding else {}
        return {"architecture": source.config.architecture | flag}

    def read_head(
        self, source: FusedFiles, tensors: dict[str, Tensor], target: TargetFiles | None
    ) -> None:
        if HEAD not in tensors:
            if target is None:
                raise MissingTarget(
                    f"{source.files.directory}: {HEAD} is missing, so it is the target's; give "
                    "--target"
                )
            tensors[HEAD] = target.load_head().to(tensors["fc.weight"].dtype)

    def adjust_expected(self, source: FusedFiles, expected: ExpectedTensors) -> ExpectedTensors:
        """Require the output layer where config.json counts its rows, because SGLang then takes
        none from the target.
        """
        is_head = {name: source.layout.names.to_native(name) == HEAD for name in expected.optional}
        if source.config.draft_vocab_size is None or not any(is_head.values()):
            return expected
        own, optional = (
            {name: shape for name, shape in expected.optional.items() if is_head[name] is wanted}
            for wanted in (True, False)
        )
        return replace(expected, required={**expected.required, **own}, optional=optional)

    def complete(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> DrafterCheckpoint:
        if drafter.drafter["layers"] is None and target is not None:
            drafter.drafter["layers"] = unnamed_layers(target)
        return drafter


EAGLE3 = Eagle3Family()


def eagle3_names(prefix: str) -> TensorNames:
    """Return the names of tensors where those of the first layer have this prefix."""

    def to_native(name: str) -> str:
        name = name.removeprefix("model.").removeprefix("midlayer.").removeprefix("layers.0.")
        kind, _, rest = name.partition(".")
        number, _, rest = rest.partition(".")
        return (
            f"later.{int(number) - 1}.{rest}" if kind == "layers" and number.isdecimal() else name
        )

    def to_file(name: str) -> str:
        if name.startswith("later."):
            _, number, rest = name.split(".", 2)
            return f"layers.{int(number) + 1}.{rest}"
        return prefix + name if name.startswith(LAYER_PARTS) else name

    return TensorNames(to_native, to_file)


def unnamed_layers(target: TargetFiles) -> list[int]:
    """Return the layers that engines fuse where config.json names none; raise UserError for a
    target that is too small.
    """
    layers = engine_layers(target.num_layers)
    if layers is None:
        raise UserError(
            "config.json names no fused layers, and the engines' default, 2, the middle and "
            f"three before the end, is not three different ones of the {target.num_layers} layers "
            f"of {target.reference}; write those that it was trained on"
        )
    return layers


def check_layer_count(
    drafter: DrafterCheckpoint, target: TargetFiles | None, engine: str, lowest: int = 0
) -> None:
    """Raise UserError where an engine that fuses exactly three layers, none below the lowest,
    cannot serve a drafter.
    """
    layers = drafter.drafter.get("layers")
    if layers is None or (len(layers) == NUM_FUSED_LAYERS and min(layers) >= lowest):
        return
    default = [] if target is None else default_layers(target.num_layers)
    is_possible = len(default) == NUM_FUSED_LAYERS and default[0] >= lowest
    remedy = f"train with drafter.layers={default}, or use" if is_possible else "use"
    bound = ", none of them 0," if lowest else ""
    raise UserError(
        f"drafter.layers={layers}: {engine} fuses exactly three layers of the target{bound} and "
        f"this drafter {len(layers)} ({', '.join(map(str, layers))}); {remedy} the format vllm"
    )


def drafter_layer_config(drafter: DrafterCheckpoint) -> dict[str, Any]:
    """Return the drafter's layers as a Llama or Qwen3 configuration."""
    architecture = drafter.drafter["architecture"]
    count = drafter.drafter["num_layers"]
    window = drafter.drafter.get("window")
    return {
        "model_type": "qwen3" if architecture.get("qk_norm") else "llama",
        "hidden_size": drafter.tensors["fc.weight"].shape[0],
        **{key: architecture[key] for key in LAYER_KEYS if key in architecture},
        "rope_parameters": layer_rope(architecture),
        "num_hidden_layers": count,
        **({} if window is None else sliding_config(window, count)),
        "vocab_size": len(drafter.tensors["t2d"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def sliding_config(window: int, num_layers: int) -> dict[str, Any]:
    """Return the entries of Llama's and Qwen3's configurations for a sliding window in every
    layer.
    """
    kinds = ["sliding_attention"] * num_layers
    return {
        "use_sliding_window": True,
        "sliding_window": window,
        "max_window_layers": 0,
        "layer_types": kinds,
    }


def variant_flags(drafter: DrafterCheckpoint) -> dict[str, bool]:
    return {key: bool(drafter.drafter["architecture"].get(key, False)) for key in VARIANTS}


def complete_settings(drafter: dict[str, Any], target: TargetFiles) -> dict[str, Any]:
    """Return a drafter's settings with the target's values filled in."""
    layers = drafter.get("layers")
    fused_layers = default_layers(target.num_layers) if layers is None else sorted(set(layers))
    return {
        **drafter,
        "architecture": complete_layer(drafter.get("architecture"), target),
        "layers": fused_layers,
    }


def complete_layer(architecture: dict[str, Any] | None, target: TargetFiles) -> dict[str, Any]:
    """Return an `architecture` with the values of the target's layer filled in."""
    given = architecture or {}
    sizes = latent_sizes(target.config, given, target.reference) if is_latent(given) else {}
    layer = llama_layer_settings(target.config, {**given, **sizes})
    if sizes:
        # Latent attention has keys and values for every head.
        layer["num_key_value_heads"] = layer["num_attention_heads"]
    return {
        key: value
        for key, value in layer.items()
        if key in LAYER_KEYS or key in given or key in sizes
    }
