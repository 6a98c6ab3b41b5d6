"""The GGUF layout of EAGLE-3 for llama.cpp (--spec-type draft-eagle3): layer ids name the layer
that a stream enters.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from spectrain.drafters.layers.eagle_layers import default_layers
from spectrain.errors import UserError
from spectrain.export.container import Finding
from spectrain.export.eagle3 import (
    EAGLE3,
    NUM_FUSED_LAYERS,
    check_layer_count,
    drafter_layer_config,
    unnamed_layers,
    variant_flags,
)
from spectrain.export.fused import Export, FusedFiles, FusedLayout, TensorNames, launch_with
from spectrain.export.fused_config import EMBEDDING, HEAD, FusedConfig
from spectrain.export.fused_findings import (
    common_findings,
    common_target_findings,
    find_common_obstacle,
)
from spectrain.export.layout import require_target
from spectrain.export.targets import TargetFiles
from spectrain.export.vocabulary import target_ids

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
    "input_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    HEAD: "output.weight",
    EMBEDDING: "token_embd.weight",
    "hidden_norm.weight": "blk.0.attn_norm_2.weight",
    **{f"{ours}.weight": f"blk.0.{name}.weight" for ours, name in LAYER_NAMES.items()},
}
NATIVE_NAMES = {name: ours for ours, name in TENSOR_NAMES.items()}


def parse_config(source: FusedFiles) -> FusedConfig:
    """Translate the keys."""
    keys = source.files.config
    variants = {
        name: bool(keys.get(f"eagle3.{name}", False))
        for name in ("norm_before_residual", "norm_before_fc")
    }
    rows = source.files.tensors["d2t"].shape[0] if "d2t" in source.files.tensors else None
    return FusedConfig(layer_config(keys), list(keys["eagle3.target_layers"]), variants, rows)


def find_width_obstacle(source: FusedFiles) -> str | None:
    width = source.files.config["eagle3.embedding_length"]
    target_width = source.files.config.get("eagle3.target_hidden_size")
    if target_width not in (None, width):
        return (
            f"eagle3.target_hidden_size={target_width}: {source.layout.choice} has its target's "
            f"width, not {width}"
        )
    return None


def file_findings(source: FusedFiles) -> Iterator[Finding]:
    """Yield the faults of the file, those of d2t first because they hide the others."""
    ids = source.files.tensors.get("d2t")
    if (
        ids is not None
        and len(ids.unique()) < len(ids)
        and len(target_ids(ids).unique()) == len(ids)
    ):
        yield Finding(
            "d2t-offsets",
            "error",
            "d2t holds offsets from draft ids where ids of the target belong",
            "llama.cpp reads them as ids, so almost every draft is another token",
            "add 0, 1, 2 and so on to it: spectrain convert the original files --to gguf",
        )
        return
    yield from common_findings(source)
    layers = source.files.config["eagle3.target_layers"]
    if len(layers) != NUM_FUSED_LAYERS:
        yield Finding(
            "layer-ids-count",
            "error",
            f"eagle3.target_layers={layers} has {len(layers)} entries",
            f"llama.cpp stops unless there are {NUM_FUSED_LAYERS}",
            "train it on three layers",
        )


def numbering_findings(source: FusedFiles, target: TargetFiles) -> Iterator[Finding]:
    """Yield a fault where the fused layers look like SGLang's numbers."""
    layers = list(source.files.config["eagle3.target_layers"])
    default = default_layers(target.num_layers)
    if layers == [layer - 1 for layer in default]:
        yield Finding(
            "layer-ids-numbering",
            "warning",
            f"eagle3.target_layers={layers} look like SGLang's numbers of the default layers",
            "llama.cpp numbers the layer that a stream enters, one more than the layer that "
            "it leaves",
            f"write {default}, unless it was trained on these",
        )


def check_writable(export: Export) -> None:
    """Raise UserError for what llama.cpp's EAGLE-3 lacks."""
    require_target(export.target, "the file holds its tokenizer and its layers")
    variants = variant_flags(export.drafter)
    for flag in ("norm_output", "fc_norm", "qk_norm"):
        if variants.get(flag):
            raise UserError(
                f"{flag}: llama.cpp's EAGLE-3 has no such norm; train with "
                f"drafter.architecture.{flag}=false"
            )
    if export.settings["num_layers"] > 1:
        raise UserError(
            f"drafter.num_layers={export.settings['num_layers']}: llama.cpp's EAGLE-3 has one "
            "layer; train with drafter.num_layers=1"
        )
    if export.settings.get("window") is not None:
        raise UserError(
            f"drafter.window={export.settings['window']}: llama.cpp's EAGLE-3 attends to all "
            "positions; train with drafter.window=null"
        )
    check_layer_count(export.drafter, export.target, "llama.cpp's EAGLE-3")
    unknown = sorted(name for name in export.tensors if name not in (*TENSOR_NAMES, "d2t", "t2d"))
    if unknown:
        raise UserError(
            f"{unknown[0]}: llama.cpp's EAGLE-3 has no such tensor; train without it, or use "
            "--to vllm"
        )


def make_config(export: Export) -> dict[str, Any]:
    """Return the keys of the file."""
    target = export.known_target
    config = drafter_layer_config(export.drafter)
    variants = variant_flags(export.drafter)
    layers = export.settings["layers"]
    return {
        "general.name": f"EAGLE-3 for {target.name}",
        LAYER: config,
        "eagle3.target_layers": unnamed_layers(target) if layers is None else list(layers),
        "eagle3.target_hidden_size": config["hidden_size"],
        "eagle3.norm_before_residual": variants["norm_before_residual"],
        "eagle3.norm_before_fc": variants["norm_before_fc"],
    }


GGUF_EAGLE3 = FusedLayout(
    title="EAGLE-3, GGUF",
    family=EAGLE3,
    container=Gguf("eagle3", interleaves=True),
    names=TensorNames(
        lambda name: NATIVE_NAMES.get(name, name), lambda name: TENSOR_NAMES.get(name, name)
    ),
    parse=parse_config,
    make_config=make_config,
    obstacles=(
        find_width_obstacle,
        find_common_obstacle,
        lambda source: find_foreign_rope(source.files),
    ),
    file_checks=(file_findings,),
    target_checks=(common_target_findings, numbering_findings),
    write_checks=(check_writable,),
    misreadings=(
        partial(
            unpermuted_interpretation,
            remedy="llama.cpp rotates neighbours: write their rows in pairs",
        ),
    ),
    launches=launch_with({"llamacpp": "draft-eagle3"}),
)
