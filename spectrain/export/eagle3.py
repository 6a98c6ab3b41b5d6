"""What the layouts of EAGLE-3 share. Sizes: H width of the drafter, V vocabulary of the target, Vd of the drafter.

Our names of the tensors are the plain ones (`fc.weight`, `self_attn.q_proj.weight`); layouts put the first layer's under a
prefix, and those of the layers behind it, our `later.0.`, under `layers.1.` and so on.
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
IGNORED_TENSORS = ("verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")  # by every reader, without harm
EAGLE3_CLASS = "spectrain.drafters.eagle3.Eagle3"


def native_name(name: str) -> str:
    """A tensor's name without the prefix of the first layer, or under our own of a later one."""
    name = name.removeprefix("model.")
    for prefix in FIRST_LAYER_PREFIXES:
        name = name.removeprefix(prefix)
    kind, _, rest = name.partition(".")
    number, _, rest = rest.partition(".")
    return f"later.{int(number) - 1}.{rest}" if kind == "layers" and number.isdecimal() else name


def layout_name(name: str, prefix: str) -> str:
    """The name that a layout has for one of our tensors."""
    if name.startswith("later."):
        _, number, rest = name.split(".", 2)
        return f"layers.{int(number) + 1}.{rest}"
    return prefix + name if name.startswith(LAYER_PARTS) else name


class Eagle3Layout(Layout):
    """A layout of EAGLE-3: `settings` says what config.json means, the rest is the same for all."""

    families = ("eagle3",)
    constructor: ClassVar[str] = EAGLE3_CLASS
    prefix: ClassVar[str]

    @abstractmethod
    def parse_config(self, files: DrafterFiles) -> FusedConfig:
        """What config.json says, in our terms; a KeyError names what is missing."""

    def native_tensors(self, files: DrafterFiles) -> dict[str, Tensor]:
        """The tensors under our names."""
        return {native_name(name): tensor for name, tensor in files.tensors.items()}

    def as_fused(self, files: DrafterFiles) -> tuple[FusedConfig, dict[str, Tensor]] | None:
        return self.parse_config(files), self.native_tensors(files)

    def expected_tensors(self, files: DrafterFiles) -> ExpectedTensors:
        said = self.parse_config(files)
        target_vocab = int(said.layer_config["vocab_size"])
        own = said.draft_vocab_size is not None and said.draft_vocab_size != target_vocab
        shapes = self.native_shapes(said, said.draft_vocab_size or target_vocab)
        optional = {"embed_tokens.weight": (target_vocab, said.width), "t2d": shapes.pop("t2d")}
        if not own:
            optional |= {name: shapes.pop(name) for name in ("d2t", "lm_head.weight")}
        present = {native_name(name): name for name in files.tensors}

        def named(group: dict[str, tuple[int | None, ...]]) -> dict[str, tuple[int | None, ...]]:
            return {present.get(name, layout_name(name, self.prefix)): shape for name, shape in group.items()}

        return ExpectedTensors(named(shapes), named(optional), IGNORED_TENSORS)

    def native_shapes(self, said: FusedConfig, draft_vocab: int) -> dict[str, tuple[int | None, ...]]:
        """The tensors of our class, under our names."""
        return eagle3_shapes(said, draft_vocab, int(said.layer_config["vocab_size"]))

    def family_settings(self, files: DrafterFiles, said: FusedConfig, own_embedding: bool) -> dict[str, Any]:
        """What our constructor takes beside what every drafter of these layers does."""
        return {"architecture": said.architecture | ({"own_embedding": True} if own_embedding else {})}

    def read(self, files: DrafterFiles, target: TargetFiles | None) -> DrafterCheckpoint:
        said, tensors = self.parse_config(files), self.native_tensors(files)
        why = find_unsupported(files, said, tensors)
        if why is not None:
            raise UserError(f"{files.directory}: {why}")
        for name in IGNORED_TENSORS:
            tensors.pop(name, None)
        vocab = int(said.layer_config["vocab_size"])
        if "lm_head.weight" not in tensors:
            if target is None:
                raise UserError(f"{files.directory}: lm_head.weight is the target's own; say which target that is")
            tensors["lm_head.weight"] = target.load_head().to(tensors["fc.weight"].dtype)
        size = len(tensors["lm_head.weight"])
        tensors.setdefault("d2t", torch.zeros(size, dtype=torch.int64))
        tensors["d2t"] = tensors["d2t"].to(torch.int64)
        ids = tensors["d2t"] + torch.arange(size)
        if "t2d" not in tensors:
            tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
        tensors["t2d"] = tensors["t2d"].to(torch.bool)
        own = tensors.get("embed_tokens.weight")
        if own is not None and target is not None and equal_when_rounded(own, target.load_embedding()):
            own = None
            del tensors["embed_tokens.weight"]
        kept = files.read_metadata()
        drafter = {"_target_": self.constructor, **kept.drafter}
        drafter |= {"vocab_size": size, "layers": said.layers, "num_layers": said.num_layers}
        if said.window is not None:
            drafter["window"] = said.window
        if said.layers is None and target is not None:
            drafter["layers"] = default_layers(target.num_layers)
        drafter |= self.family_settings(files, said, own is not None)
        return DrafterCheckpoint(drafter, tensors, self.target_name(files), description=kept.description)

    def target_name(self, files: DrafterFiles) -> str | None:
        """The target that the files name."""
        return files.read_metadata().target

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        said, tensors = self.parse_config(files), self.native_tensors(files)
        why = find_unsupported(files, said, tensors)
        if why is not None:
            yield Finding("not-representable", "warning", why, "spectrain cannot score or fine-tune it", "nothing, to serve it")
        if len(tensors.get("d2t", ())) == said.layer_config["vocab_size"]:
            yield Finding(
                "d2t-of-all", "error", "d2t lies beside an output layer over the whole vocabulary",
                "vLLM knows no map there and stops at the tensor", "spectrain convert DIR OUT --to vllm --target TARGET",
            )  # fmt: skip


def drop_full_maps(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the maps where they say nothing: over the whole vocabulary vLLM knows none."""
    whole = len(tensors["d2t"]) == len(tensors["t2d"])
    return {name: tensor for name, tensor in tensors.items() if not whole or name not in ("d2t", "t2d")}


def drafter_layer_config(drafter: DrafterCheckpoint) -> dict[str, Any]:
    """The whole layer of a drafter as a Llama configuration, for a layout's config.json."""
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
    """Every layer through a sliding window, as Llama's and Qwen3's configurations say it."""
    kinds = ["sliding_attention"] * num_layers
    return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0, "layer_types": kinds}


def variant_flags(drafter: DrafterCheckpoint) -> dict[str, bool]:
    return {key: bool(drafter.drafter["architecture"].get(key, False)) for key in VARIANTS}


def complete_settings(drafter: dict[str, Any], target: TargetFiles) -> dict[str, Any]:
    """A description of ours with everything said that it leaves to the target."""
    layers = drafter.get("layers")
    chosen = default_layers(target.num_layers) if layers is None else sorted(set(layers))
    return {**drafter, "architecture": complete_layer(drafter.get("architecture"), target), "layers": chosen}


def complete_layer(asked: dict[str, Any] | None, target: TargetFiles) -> dict[str, Any]:
    """An `architecture` with everything said that it leaves to the target's layer."""
    layer = {key: value for key, value in llama_layer_settings(target.config).items() if key in LAYER_KEYS}
    layer["rope_parameters"] = read_rope(layer)
    return {**layer, **(asked or {})}


def eagle3_shapes(said: FusedConfig, draft_vocab: int, vocab: int) -> dict[str, tuple[int | None, ...]]:
    """The tensors of our class with these settings, under our names."""
    architecture, width = said.architecture, said.width
    fused = (3 if said.layers is None else len(said.layers)) * width
    shapes: dict[str, tuple[int | None, ...]] = {
        "fc.weight": (width, fused),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
        **layer_shapes(architecture, width, 2 * width),
        **{
            f"later.{number}.{name}": shape
            for number in range(said.num_layers - 1)
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
    """The tensors of one layer, whose attention reads `in_width`."""
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


def find_unsupported(files: DrafterFiles, said: FusedConfig, tensors: dict[str, Tensor]) -> str | None:
    """What our class cannot represent, by the name of a tensor or a flag; None where it can all of it."""
    layer, config = said.layer_config, files.config
    for name in tensors:
        if name.endswith(".bias"):
            return f"{name}: linears of drafter=eagle3 have no bias"
    if layer.get("hidden_act", "silu") != "silu":
        return f"hidden_act={layer['hidden_act']}: drafter=eagle3 has silu"
    if len(said.attention_kinds) > 1:
        return "layer_types: drafter=eagle3 has one sliding window for all of its layers, or none"
    wide = config.get("target_hidden_size")
    if wide is not None and wide != said.width:
        return f"target_hidden_size={wide}: drafter=eagle3 is as wide as its target, and hidden_size is {said.width}"
    return None


def equal_when_rounded(one: Tensor, other: Tensor) -> bool:
    """Equal numbers, where one may have been rounded to the other's type."""
    return one.shape == other.shape and torch.equal(one, other.to(one.dtype))
