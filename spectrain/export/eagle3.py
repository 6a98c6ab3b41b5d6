"""The base of EAGLE-3's layouts. Sizes: H width of the drafter, V vocabulary of the target, Vd of the drafter.

Spectrain's tensor names have no prefix for the first layer (`fc.weight`, `self_attn.q_proj.weight`); layouts have one. Later
layers are `later.0.` and so on in spectrain, `layers.1.` and so on in layouts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from spectrain.drafters.eagle3 import VARIANTS
from spectrain.drafters.layers.eagle_layers import LAYER_KEYS, default_layers
from spectrain.drafters.layers.layers import llama_layer_settings
from spectrain.errors import UserError

from .fused_settings import FusedConfig, read_rope
from .layout import DrafterCheckpoint, DrafterFiles, ExpectedTensors, Finding, Layout
from .targets import TargetFiles

LAYER_PARTS = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn", "mlp")
FIRST_LAYER_PREFIXES = ("midlayer.", "layers.0.")
IGNORED_TENSORS = ("verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")
"""Tensors that every reader ignores without harm."""
EAGLE3_CLASS = "spectrain.drafters.eagle3.Eagle3"


def native_name(name: str) -> str:
    """Return spectrain's name of a tensor: no prefix for the first layer, `later.` for the others."""
    name = name.removeprefix("model.")
    for prefix in FIRST_LAYER_PREFIXES:
        name = name.removeprefix(prefix)
    kind, _, rest = name.partition(".")
    number, _, rest = rest.partition(".")
    return f"later.{int(number) - 1}.{rest}" if kind == "layers" and number.isdecimal() else name


def layout_name(name: str, prefix: str) -> str:
    """Return a layout's name of a tensor."""
    if name.startswith("later."):
        _, number, rest = name.split(".", 2)
        return f"layers.{int(number) + 1}.{rest}"
    return prefix + name if name.startswith(LAYER_PARTS) else name


class Eagle3Layout(Layout):
    """The base of EAGLE-3's layouts: `parse_config` translates config.json, all else is shared."""

    constructor: ClassVar[str] = EAGLE3_CLASS
    prefix: ClassVar[str]

    @abstractmethod
    def parse_config(self, files: DrafterFiles) -> FusedConfig:
        """Translate config.json into spectrain's terms; raise KeyError naming what is missing."""

    def native_tensors(self, files: DrafterFiles) -> dict[str, Tensor]:
        """Return the tensors under spectrain's names."""
        return {native_name(name): tensor for name, tensor in files.tensors.items()}

    def as_fused(self, files: DrafterFiles) -> tuple[FusedConfig, dict[str, Tensor]] | None:
        return self.parse_config(files), self.native_tensors(files)

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        config = self.parse_config(files)
        target_vocab = int(config.layer_config["vocab_size"])
        has_draft_vocabulary = config.draft_vocab_size is not None and config.draft_vocab_size != target_vocab
        shapes = self.native_shapes(config, config.draft_vocab_size or target_vocab)
        optional = {"embed_tokens.weight": (target_vocab, config.width), "t2d": shapes.pop("t2d")}
        if not has_draft_vocabulary:
            optional |= {name: shapes.pop(name) for name in ("d2t", "lm_head.weight")}
        present = {native_name(name): name for name in files.tensors}

        def rename(group: dict[str, tuple[int | None, ...]]) -> dict[str, tuple[int | None, ...]]:
            return {present.get(name, layout_name(name, self.prefix)): shape for name, shape in group.items()}

        return ExpectedTensors(rename(shapes), rename(optional), IGNORED_TENSORS)

    def native_shapes(self, config: FusedConfig, draft_vocab: int) -> dict[str, tuple[int | None, ...]]:
        """Return the shapes of the class's tensors, under spectrain's names."""
        return eagle3_shapes(config, draft_vocab, int(config.layer_config["vocab_size"]))

    def family_settings(self, files: DrafterFiles, config: FusedConfig, own_embedding: bool) -> dict[str, Any]:
        """Return the settings of the class that not every EAGLE-3 drafter has."""
        return {"architecture": config.architecture | ({"own_embedding": True} if own_embedding else {})}

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        config, tensors = self.parse_config(files), self.native_tensors(files)
        problem = find_unsupported(files, config, tensors)
        if problem is not None:
            raise UserError(f"{files.directory}: {problem}")
        for name in IGNORED_TENSORS:
            tensors.pop(name, None)
        vocab = int(config.layer_config["vocab_size"])
        if "lm_head.weight" not in tensors:
            if target is None:
                raise UserError(f"{files.directory}: lm_head.weight is missing, so it is the target's; give --target")
            tensors["lm_head.weight"] = target.load_head().to(tensors["fc.weight"].dtype)
        size = len(tensors["lm_head.weight"])
        tensors.setdefault("d2t", torch.zeros(size, dtype=torch.int64))
        tensors["d2t"] = tensors["d2t"].to(torch.int64)
        ids = tensors["d2t"] + torch.arange(size)
        if "t2d" not in tensors:
            tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
        tensors["t2d"] = tensors["t2d"].to(torch.bool)
        embedding = tensors.get("embed_tokens.weight")
        if embedding is not None and target is not None and equal_when_rounded(embedding, target.load_embedding()):
            embedding = None
            del tensors["embed_tokens.weight"]
        metadata = files.read_metadata()
        drafter = {"_target_": self.constructor, **metadata.drafter}
        drafter |= {"vocab_size": size, "layers": config.layers, "num_layers": config.num_layers}
        if config.window is not None:
            drafter["window"] = config.window
        if config.layers is None and target is not None:
            drafter["layers"] = default_layers(target.num_layers)
        drafter |= self.family_settings(files, config, embedding is not None)
        return DrafterCheckpoint(drafter, tensors, self.target_name(files), description=metadata.description)

    def target_name(self, files: DrafterFiles) -> str | None:
        """Return the target that the files name."""
        return files.read_metadata().target

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        config, tensors = self.parse_config(files), self.native_tensors(files)
        problem = find_unsupported(files, config, tensors)
        if problem is not None:
            yield Finding(
                "not-representable", "warning", problem, "spectrain cannot score or fine-tune it", "nothing, to serve it"
            )
        if len(tensors.get("d2t", ())) == config.layer_config["vocab_size"]:
            yield Finding(
                "d2t-of-all", "error", "the files hold d2t and an output layer over the full vocabulary",
                "vLLM expects no map there and stops at the tensor", "spectrain convert DIR OUT --to vllm --target TARGET",
                is_repairable=True,
            )  # fmt: skip


def drop_full_maps(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop d2t and t2d where the draft vocabulary is the full one, because vLLM expects no map there."""
    is_full = len(tensors["d2t"]) == len(tensors["t2d"])
    return {name: tensor for name, tensor in tensors.items() if not is_full or name not in ("d2t", "t2d")}


def drafter_layer_config(drafter: DrafterCheckpoint) -> dict[str, Any]:
    """Return the drafter's layers as a Llama or Qwen3 configuration."""
    architecture, count = drafter.drafter["architecture"], drafter.drafter["num_layers"]
    window = drafter.drafter.get("window")
    return {
        "model_type": "qwen3" if architecture.get("qk_norm") else "llama",
        "hidden_size": drafter.tensors["fc.weight"].shape[0],
        **{key: architecture[key] for key in LAYER_KEYS if key in architecture},
        "num_hidden_layers": count,
        **({} if window is None else sliding_config(window, count)),
        "vocab_size": len(drafter.tensors["t2d"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def sliding_config(window: int, num_layers: int) -> dict[str, Any]:
    """Return the entries of Llama's and Qwen3's configurations for a sliding window in every layer."""
    kinds = ["sliding_attention"] * num_layers
    return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0, "layer_types": kinds}


def variant_flags(drafter: DrafterCheckpoint) -> dict[str, bool]:
    return {key: bool(drafter.drafter["architecture"].get(key, False)) for key in VARIANTS}


def complete_settings(drafter: dict[str, Any], target: TargetFiles) -> dict[str, Any]:
    """Return a drafter's settings with the target's values filled in."""
    layers = drafter.get("layers")
    fused_layers = default_layers(target.num_layers) if layers is None else sorted(set(layers))
    return {**drafter, "architecture": complete_layer(drafter.get("architecture"), target), "layers": fused_layers}


def complete_layer(architecture: dict[str, Any] | None, target: TargetFiles) -> dict[str, Any]:
    """Return an `architecture` with the values of the target's layer filled in."""
    layer = {key: value for key, value in llama_layer_settings(target.config).items() if key in LAYER_KEYS}
    layer["rope_parameters"] = read_rope(layer)
    return {**layer, **(architecture or {})}


def eagle3_shapes(config: FusedConfig, draft_vocab: int, vocab: int) -> dict[str, tuple[int | None, ...]]:
    """Return the shapes of the tensors of `Eagle3` with these settings, under spectrain's names."""
    architecture, width = config.architecture, config.width
    fused = (3 if config.layers is None else len(config.layers)) * width
    shapes: dict[str, tuple[int | None, ...]] = {
        "fc.weight": (width, fused),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
        **layer_shapes(architecture, width, 2 * width),
        **{
            f"later.{number}.{name}": shape
            for number in range(config.num_layers - 1)
            for name, shape in layer_shapes(architecture, width, width).items()
        },
        "lm_head.weight": (draft_vocab, width),
        "d2t": (draft_vocab,),
        "t2d": (vocab,),
    }
    if architecture.get("norm_before_fc"):
        shapes["input_norm.weight"] = (fused,)
    if architecture.get("fc_norm"):
        shapes |= {f"fc_norm.{index}.weight": (width,) for index in range(fused // width)}
    if architecture.get("own_embedding"):
        shapes["embed_tokens.weight"] = (vocab, width)
    return shapes


def layer_shapes(architecture: dict[str, Any], width: int, in_width: int) -> dict[str, tuple[int | None, ...]]:
    """Return the shapes of one layer's tensors; its attention reads `in_width` features."""
    inner, head = architecture["intermediate_size"], architecture["head_dim"]
    queries, keys = architecture["num_attention_heads"] * head, architecture["num_key_value_heads"] * head
    return {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (queries, in_width),
        "self_attn.k_proj.weight": (keys, in_width),
        "self_attn.v_proj.weight": (keys, in_width),
        "self_attn.o_proj.weight": (width, queries),
        **({f"self_attn.{part}_norm.weight": (head,) for part in "qk"} if architecture.get("qk_norm") else {}),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }


def find_unsupported(files: DrafterFiles, fused: FusedConfig, tensors: dict[str, Tensor]) -> str | None:
    """Describe the first tensor or key that spectrain's class cannot represent; return None where there is none."""
    layer, config = fused.layer_config, files.config
    for name in tensors:
        if name.endswith(".bias"):
            return f"{name}: linears of drafter=eagle3 have no bias"
    if layer.get("hidden_act", "silu") != "silu":
        return f"hidden_act={layer['hidden_act']}: drafter=eagle3 has silu"
    if len(fused.attention_kinds) > 1:
        return "layer_types: drafter=eagle3 has the same sliding window in all of its layers, or none"
    target_width = config.get("target_hidden_size")
    if target_width is not None and target_width != fused.width:
        return f"target_hidden_size={target_width}: drafter=eagle3 has its target's width, and hidden_size is {fused.width}"
    return None


def equal_when_rounded(first: Tensor, second: Tensor) -> bool:
    """Tell whether two tensors are equal after rounding the second to the first one's dtype."""
    return first.shape == second.shape and torch.equal(first, second.to(first.dtype))
