"""The container of llama.cpp, one GGUF file: its names of a layer's sizes, and the order of
queries and keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.export.container import Container, Finding, Rename
from spectrain.export.drafter_files import DrafterFiles
from spectrain.export.layout import DrafterCheckpoint, Interpretation
from spectrain.export.targets import TargetFiles
from spectrain.export.vocabulary import target_ids
from spectrain.models.rope import read_rope

from ..engines.llamacpp_command import DRAFTER_FILE
from .gguf_file import (
    WEIGHT_TYPES,
    TensorSource,
    find_gguf,
    open_gguf,
    read_keys,
    read_tensors,
    write_gguf,
)
from .gguf_tokenizer import tokenizer_keys

SIZE_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "vocab_size": "vocab_size",
}
"""Key of a transformers configuration -> llama.cpp's, which stands behind the name of the
architecture.
"""
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Part of a layer in transformers -> in GGUF."""
ROPE_KEY = "spectrain.rope_parameters"
"""The rotary embedding as JSON, which llama.cpp's own keys do not determine where it is scaled."""
ROPE_FACTORS = "rope_freqs.weight"
LAYER = "layer"
"""Entry of the settings to write that holds the transformers configuration of the layers."""


@dataclass(frozen=True)
class Gguf(Container):
    """A directory with one GGUF file; its keys are `files.config`.

    d2t holds ids of the target in the file and offsets here.
    """

    architecture: str | None  # llama.cpp's name of the model
    interleaves: bool = False  # whether it rotates neighbours, which reorders queries and keys
    dtype: str | None = None  # type of the matrices; None keeps their own
    mixes_dtypes = True
    ignored_tensors = (ROPE_FACTORS,)

    def read_files(self, directory: Path) -> DrafterFiles:
        reader = open_gguf(find_gguf(directory))
        return DrafterFiles(directory, read_keys(reader), read_tensors(reader))

    def check_data(self, files: DrafterFiles) -> None:
        """Keys of a GGUF file are numbers and texts, which construct nothing."""
        return

    def holds(self, files: DrafterFiles) -> bool:
        return files.config.get("general.architecture") == self.architecture

    def with_dtype(self, dtype: str) -> Gguf:
        if dtype not in WEIGHT_TYPES:
            raise UserError(
                f"dtype={dtype}: a GGUF file has no such type here; use {', '.join(WEIGHT_TYPES)}"
            )
        return replace(self, dtype=dtype)

    def read_tensors(self, files: DrafterFiles, to_native: Rename) -> dict[str, Tensor]:
        tensors = super().read_tensors(files, to_native)
        # The settings of the rotary embedding, which the file holds too, determine these.
        tensors.pop(ROPE_FACTORS, None)
        if "d2t" in tensors:
            tensors["d2t"] = tensors["d2t"].long() - torch.arange(len(tensors["d2t"]))
        if self.interleaves:
            return convert_heads(tensors, layer_config(files.config), to_file=False)
        return tensors

    def write(
        self,
        directory: Path,
        config: dict[str, Any],
        tensors: dict[str, Tensor],
        to_file: Rename,
        target: TargetFiles | None,
    ) -> None:
        """Write the file of a drafter with its target's tokenizer."""
        assert target is not None and self.architecture is not None
        keys = tokenizer_keys(target)
        for key, value in config.items():
            keys |= size_keys(self.architecture, value) if key == LAYER else {key: value}
        if self.interleaves:
            tensors = convert_heads(tensors, config[LAYER], to_file=True)
        stored = {to_file(name): tensor for name, tensor in tensors.items() if name != "t2d"}
        if "d2t" in stored:
            stored["d2t"] = target_ids(stored["d2t"])
        stored |= rope_tensors(config[LAYER])
        sources = {
            name: TensorSource.from_tensor(stored[name].detach().cpu()) for name in sorted(stored)
        }
        write_gguf(directory / DRAFTER_FILE, self.architecture, keys, sources, self.dtype)

    def findings_with_target(self, files: DrafterFiles, target: TargetFiles) -> Iterator[Finding]:
        keys = read_keys(open_gguf(find_gguf(files.directory)), with_vocabulary=True)
        names = ("tokenizer.ggml.model", "tokenizer.ggml.tokens")
        if [keys.get(name) for name in names] != [
            tokenizer_keys(target).get(name) for name in names
        ]:
            yield Finding(
                "tokenizer",
                "error",
                "its tokens are not the target's",
                "llama.cpp compares ids, so drafts are other tokens, and it stops where both "
                "differ in kind",
                "write it again for this target: spectrain convert DIR OUT --to gguf --target "
                "TARGET",
            )


def size_keys(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a transformers configuration's sizes and of its rotary embedding."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    config = {**config, "head_dim": head_dim, "num_key_value_heads": heads}
    keys = {
        f"{architecture}.{name}": config[key]
        for key, name in SIZE_KEYS.items()
        if config.get(key) is not None
    }
    keys[f"{architecture}.attention.value_length"] = keys[
        f"{architecture}.rope.dimension_count"
    ] = head_dim
    rope = read_rope(config)
    keys[f"{architecture}.rope.freq_base"] = float(rope["rope_theta"])
    keys[f"{architecture}.attention.layer_norm_rms_epsilon"] = float(config["rms_norm_eps"])
    return keys | scaling_keys(architecture, rope, config["max_position_embeddings"])


def scaling_keys(architecture: str, rope: dict[str, Any], max_positions: int) -> dict[str, Any]:
    """Return the keys of a scaled rotary embedding; raise UserError where llama.cpp has none for
    it.
    """
    kind = rope["rope_type"]
    keys = dict[str, Any]()
    if kind == "default":
        return keys
    known = {
        "rope_type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    }
    has_one_list = (
        kind == "longrope"
        and rope.get("attention_factor") == 1
        and rope["short_factor"] == rope["long_factor"]
    )
    if not has_one_list and (kind not in ("linear", "yarn", "llama3") or rope.keys() - known):
        raise UserError(
            f"rope_parameters={rope}: it cannot be written as GGUF; llama.cpp gets default, "
            "linear, yarn and llama3 with their usual settings, and longrope with one list of "
            "factors"
        )
    keys[ROPE_KEY] = json.dumps(rope)
    if kind in ("linear", "yarn"):
        prefix = f"{architecture}.rope.scaling"
        keys |= {f"{prefix}.type": kind, f"{prefix}.factor": float(rope["factor"])}
    if kind == "yarn":
        keys[f"{prefix}.original_context_length"] = int(
            rope.get("original_max_position_embeddings") or max_positions
        )
    return keys


def rope_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """Return the divisors of Llama 3's and longrope's frequencies, one for each pair of
    dimensions; nothing for other forms.
    """
    rope = read_rope(config)
    if rope["rope_type"] == "longrope":
        return {ROPE_FACTORS: torch.tensor(rope["short_factor"], dtype=torch.float32)}
    if rope["rope_type"] != "llama3":
        return {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    wavelengths = (
        2 * math.pi * rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
    )
    low = rope["low_freq_factor"]
    high = rope["high_freq_factor"]
    factor = rope["factor"]
    share = ((rope["original_max_position_embeddings"] / wavelengths - low) / (high - low)).clamp(
        0, 1
    )
    return {ROPE_FACTORS: 1 / ((1 - share) / factor + share)}


def layer_config(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the transformers configuration that the keys of a file describe; raise KeyError for
    a size that is missing.
    """
    architecture = keys["general.architecture"]
    config = {
        key: keys[f"{architecture}.{name}"]
        for key, name in SIZE_KEYS.items()
        if f"{architecture}.{name}" in keys
    }
    for key in ("hidden_size", "intermediate_size", "num_attention_heads"):
        if key not in config:
            raise KeyError(f"{architecture}.{SIZE_KEYS[key]}")
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if "vocab_size" not in config:
        raise KeyError(f"{architecture}.vocab_size")
    return {**config, "rope_parameters": rope_parameters(keys)}


def rope_parameters(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding that the keys of a file describe."""
    architecture = keys["general.architecture"]
    if ROPE_KEY in keys:
        return dict(json.loads(keys[ROPE_KEY]))
    rope = {
        "rope_type": "default",
        "rope_theta": keys.get(f"{architecture}.rope.freq_base", 10000.0),
    }
    prefix = f"{architecture}.rope.scaling"
    if keys.get(f"{prefix}.type", "none") != "none":
        rope |= {"rope_type": keys[f"{prefix}.type"], "factor": keys[f"{prefix}.factor"]}
        length = keys.get(f"{prefix}.original_context_length")
        rope |= {} if length is None else {"original_max_position_embeddings": length}
    return rope


def find_foreign_rope(files: DrafterFiles) -> str | None:
    """Describe a rotary embedding whose settings the file lacks, or that rotates a part of a
    head; return None for others.
    """
    prefix = files.config["general.architecture"]
    rotated, size = (
        files.config.get(f"{prefix}.{name}")
        for name in ("rope.dimension_count", "attention.key_length")
    )
    if None not in (rotated, size) and rotated != size:
        return (
            f"{prefix}.rope.dimension_count={rotated} rotates a part of a head of {size}, and "
            "our layers rotate whole heads"
        )
    if ROPE_FACTORS in files.tensors and ROPE_KEY not in files.config:
        return f"{ROPE_FACTORS} scales the rotary embedding, and the file lacks its settings"
    return None


def interleave_heads(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of queries or keys [heads x d, ..] in llama.cpp's order, which rotates
    neighbours where transformers rotates a dimension with the one half a head later."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def separate_heads(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of queries or keys [heads x d, ..] in transformers' order: the inverse of
    `interleave_heads`.
    """
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def convert_heads(
    tensors: dict[str, Tensor], config: dict[str, Any], to_file: bool
) -> dict[str, Tensor]:
    """Return tensors under transformers' names with queries and keys in llama.cpp's order or,
    without `to_file`, back.
    """
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads")}
    reorder = interleave_heads if to_file else separate_heads
    changed = {}
    for name, tensor in tensors.items():
        part = name.split(".")[-2] if "." in name else name
        changed[name] = reorder(tensor, heads[part] or heads["q_proj"]) if part in heads else tensor
    return changed


def unpermuted_interpretation(
    drafter: DrafterCheckpoint, remedy: str, to_file: bool = True
) -> Interpretation:
    """Return the interpretation that queries and keys were written in transformers' order or,
    without `to_file`, that they were reordered where the file needs transformers' order."""
    changed = convert_heads(drafter.tensors, drafter.drafter["architecture"], to_file=to_file)
    description = (
        "queries and keys in the order of transformers" if to_file else "queries and keys in pairs"
    )
    return Interpretation("heads-permuted", description, remedy, replace(drafter, tensors=changed))
