"""The GGUF layouts of DFlash, DFlash2 and DSpark for llama.cpp (--spec-type draft-dflash and
draft-dspark).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from spectrain.errors import UserError
from spectrain.export.dflash import (
    DFLASH,
    DFLASH2,
    DSPARK,
    OBSTACLES,
    block_family,
    block_findings,
    block_target_findings,
    check_block,
    num_drafts,
    qwen3_layer,
)
from spectrain.export.fused import Export, FusedFiles, FusedLayout, TensorNames
from spectrain.export.fused_config import EMBEDDING, HEAD, FusedConfig
from spectrain.export.layout import DrafterCheckpoint, require_target
from spectrain.export.targets import TargetFiles
from spectrain.servers.commands import DrafterLaunch

from .gguf_layout import (
    LAYER,
    LAYER_NAMES,
    Gguf,
    find_foreign_rope,
    layer_config,
    unpermuted_interpretation,
)

TENSOR_NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    HEAD: "output.weight",
    EMBEDDING: "token_embd.weight",
    "markov.markov_w1.weight": "markov_w1.weight",
    "markov.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
BLOCK_NAMES = {
    **{f"{ours}.weight": f"{name}.weight" for ours, name in LAYER_NAMES.items()},
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
"""Rest of a tensor's name behind `blocks.N.` -> behind `blk.N.`."""
NATIVE_NAMES = {name: ours for ours, name in (TENSOR_NAMES | BLOCK_NAMES).items()}


OWN_TENSORS = {"dflash2": "selector_hidden.weight", "dspark": "markov_w1.weight"}
"""Family -> a tensor that only its files hold."""
FOREIGN_PARTS = {
    ".bias": "a bias, which our linears lack",
    "attn_sinks": "an attention sink, which our layers lack",
    "post_attention_norm": "a norm behind the attention, which our layers lack",
    "post_ffw_norm": "a norm behind the MLP, which our layers lack",
}
SCALES = ("logit_scale", "final_logit_softcapping", "embedding_scale")


def to_native(name: str) -> str:
    prefix, _, rest = name.partition(".")
    number, _, part = rest.partition(".")
    return (
        f"blocks.{number}.{NATIVE_NAMES.get(part, part)}"
        if prefix == "blk"
        else NATIVE_NAMES.get(name, name)
    )


def to_file(name: str) -> str:
    prefix, _, rest = name.partition(".")
    number, _, part = rest.partition(".")
    return (
        f"blk.{number}.{BLOCK_NAMES.get(part, part)}"
        if prefix == "blocks"
        else TENSOR_NAMES.get(name, name)
    )


def is_of_family(source: FusedFiles) -> bool:
    names = {family for family, tensor in OWN_TENSORS.items() if tensor in source.files.tensors}
    return (names or {"dflash"}) == {source.layout.family.choice}


def parse_block(
    source: FusedFiles, read_family: Callable[[FusedFiles], dict[str, Any]]
) -> FusedConfig:
    """Translate the keys; `read_family` returns the settings that not all block drafters have."""
    keys = source.files.config
    windowed = keys.get("dflash.attention.sliding_window_pattern") or []
    settings = {
        "block_size": keys["dflash.block_size"],
        "mask_token_id": keys["tokenizer.ggml.mask_token_id"],
        "sample_from_anchor": False,
        "causal": bool(keys.get("dflash.attention.causal", False)),
        "window": keys["dflash.attention.sliding_window"] if any(windowed) else None,
        **read_family(source),
    }
    rows = source.files.tensors["d2t"].shape[0] if "d2t" in source.files.tensors else None
    return FusedConfig(layer_config(keys), list(keys["dflash.target_layers"]), {}, rows, settings)


def read_family_keys(source: FusedFiles) -> dict[str, Any]:
    family = block_family(source.layout)
    names = family.config_keys.values()
    return family.read_keys({name: source.files.config.get(f"dflash.{name}") for name in names})


def read_dspark(source: FusedFiles) -> dict[str, Any]:
    return {
        "sample_from_anchor": bool(source.files.config.get("dflash.sample_from_anchor", True)),
        "markov_head": "vanilla",
        "rank": source.files.tensors["markov_w1.weight"].shape[1],
        "confidence": "conf_proj.weight" in source.files.tensors,
    }


def find_key_obstacle(source: FusedFiles) -> str | None:
    windowed = source.files.config.get("dflash.attention.sliding_window_pattern") or []
    if len(set(windowed)) > 1:
        return (
            f"dflash.attention.sliding_window_pattern={windowed}: all layers of "
            f"{source.layout.choice} attend alike"
        )
    for key in SCALES:
        if f"dflash.{key}" in source.files.config:
            value = source.files.config[f"dflash.{key}"]
            return f"dflash.{key}={value}: {source.layout.choice} has no such scale"
    return None


def check_names(export: Export) -> None:
    """Raise UserError for a tensor without a name in llama.cpp."""
    unknown = sorted(
        name
        for name in export.tensors
        if name not in ("d2t", "t2d") and to_native(to_file(name)) != name
    )
    if unknown:
        raise UserError(
            f"{unknown[0]}: llama.cpp's {block_family(export.layout).title} has no such tensor; "
            "train without it, or use --to vllm"
        )


def make_config(export: Export) -> dict[str, Any]:
    """Return the keys of the file."""
    config = qwen3_layer(export.drafter)
    settings = export.settings
    window = settings["window"]
    windows = (
        {}
        if window is None
        else {
            "dflash.attention.sliding_window": window,
            "dflash.attention.sliding_window_pattern": [True] * config["num_hidden_layers"],
        }
    )
    return {
        "general.name": f"{block_family(export.layout).title} for {export.known_target.name}",
        LAYER: config,
        "dflash.block_size": settings["block_size"],
        "dflash.target_layers": list(settings["layers"]),
        "dflash.attention.causal": bool(settings["causal"]),
        **windows,
        **family_keys(export),
        "tokenizer.ggml.mask_token_id": settings["mask_token_id"],
    }


def family_keys(export: Export) -> dict[str, Any]:
    """Return the keys of the family's own settings."""
    if export.layout.family is DSPARK:
        return {
            "dflash.sample_from_anchor": bool(export.settings["sample_from_anchor"]),
            "dflash.has_confidence_head": bool(export.settings["confidence"]),
        }
    keys = block_family(export.layout).config_keys
    return {f"dflash.{key}": export.settings[setting] for setting, key in keys.items()}


def require_tokenizer(export: Export) -> None:
    require_target(export.target, "the file holds its tokenizer")


def launch_blocks(
    drafter: DrafterCheckpoint, files: TargetFiles, path: str
) -> dict[str, DrafterLaunch]:
    spec_type = "draft-dspark" if drafter.family == "dspark" else "draft-dflash"
    count = num_drafts(drafter)
    return {"llamacpp": DrafterLaunch(spec_type, path, count, is_parallel=True)}


BLOCK_CHECKS = (check_block, check_names)
# Queries and keys stay in transformers' order, which this model rotates.
GGUF_DFLASH = FusedLayout(
    title="DFlash, GGUF",
    family=DFLASH,
    container=Gguf("dflash"),
    names=TensorNames(to_native, to_file),
    matches=is_of_family,
    parse=partial(parse_block, read_family=read_family_keys),
    make_config=make_config,
    foreign_parts=FOREIGN_PARTS,
    obstacles=(
        find_key_obstacle,
        *OBSTACLES,
        lambda source: find_foreign_rope(source.files),
    ),
    file_checks=(block_findings,),
    target_checks=(block_target_findings,),
    write_checks=(require_tokenizer, *BLOCK_CHECKS),
    misreadings=(
        partial(
            unpermuted_interpretation,
            remedy="write their rows as in transformers, because llama.cpp's DFlash rotates those",
            to_file=False,
        ),
    ),
    launches=launch_blocks,
)


def check_selector(export: Export) -> None:
    """Raise UserError for more candidates than llama.cpp holds."""
    top_k = export.settings["selector_top_k"]
    width = export.tensors["fc.weight"].shape[0]
    if width < top_k * (top_k + 1):
        raise UserError(
            f"drafter.selector_top_k={top_k}: llama.cpp needs a width of "
            f"{top_k * (top_k + 1)}, and the drafter has {width}; train with a lower one"
        )


# A DFlash with convolutions over the block and a selector of candidates.
GGUF_DFLASH2 = replace(
    GGUF_DFLASH,
    title="DFlash2, GGUF",
    family=DFLASH2,
    write_checks=(require_tokenizer, *BLOCK_CHECKS, check_selector),
)


def check_markov_head(export: Export) -> None:
    """Raise UserError for a Markov head that llama.cpp lacks."""
    if export.settings["markov_head"] != "vanilla":
        raise UserError(
            f"drafter.markov_head={export.settings['markov_head']}: llama.cpp's DSpark has "
            "only a vanilla Markov head; train with drafter.markov_head=vanilla"
        )


# A DFlash with a vanilla Markov head and, where it has one, a confidence head.
GGUF_DSPARK = replace(
    GGUF_DFLASH,
    title="DSpark, GGUF",
    family=DSPARK,
    parse=partial(parse_block, read_family=read_dspark),
    write_checks=(require_tokenizer, check_markov_head, *BLOCK_CHECKS),
)
