"""The flat layout of EAGLE-3 that SpecForge, ModelOpt and EAGLE write and SGLang reads: one
config.json, no embedding, and `midlayer.` names.

Layer ids are SGLang's: k names the output of layer k, one less than the layer that this stream
enters. The files hold them only where they are not the default, because vLLM's numbers are one
higher.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from spectrain.drafters.layers.eagle_layers import engine_layers
from spectrain.errors import UserError
from spectrain.servers.commands import DrafterLaunch

from .container import Finding
from .eagle3 import (
    EAGLE3,
    NUM_FUSED_LAYERS,
    check_layer_count,
    drafter_layer_config,
    eagle3_names,
    variant_flags,
)
from .fused import Export, FusedFiles, FusedLayout
from .fused_config import (
    EMBEDDING,
    SIZE_KEYS,
    FusedConfig,
    flat_rope,
    require_keys,
)
from .fused_findings import (
    architecture_findings,
    common_findings,
    common_target_findings,
    find_common_obstacle,
)
from .layout import CHAIN_TOKENS, DrafterCheckpoint
from .targets import TargetFiles
from .vocabulary import drop_full_maps

NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm")


def is_flat_eagle3(source: FusedFiles) -> bool:
    """Tell whether a directory has the flat layout of EAGLE-3 or P-EAGLE."""
    has_tensors = "fc.weight" in source.files.tensors or any(
        "hidden_norm" in name for name in source.files.tensors
    )
    is_other_layout = (
        "speculators_model_type" in source.files.config or "drafter" in source.files.config
    )
    return not is_other_layout and (source.has_architecture or has_tensors)


def parse_flat_eagle3(source: FusedFiles) -> FusedConfig:
    """Translate the flat config.json."""
    config = source.files.config
    require_keys(config, SIZE_KEYS)
    layer_ids = read_layer_ids(config)
    return FusedConfig(
        config,
        None
        if layer_ids is None
        else [layer + source.layout.layer_id_offset for layer in layer_ids],
        {key: bool(config.get(key, False)) for key in NORM_FLAGS}
        | {"qk_norm": any(".q_norm." in name for name in source.files.tensors)},
        config.get("draft_vocab_size"),
    )


def read_layer_ids(config: dict[str, Any]) -> list[int] | None:
    """Return the ids of the fused layers, or None where config.json names none."""
    nested = config.get("eagle_config") or {}
    return nested.get("eagle_aux_hidden_state_layer_ids") or config.get(
        "eagle_aux_hidden_state_layer_ids"
    )


def norm_output_findings(source: FusedFiles) -> Iterator[Finding]:
    """Yield a fault of a flag that readers interpret differently."""
    if source.files.config.get("norm_output") is False:
        yield Finding(
            "norm-output-ambiguous",
            "error",
            "norm_output is false: SpecForge means no norm before the output layer",
            "other readers interpret it as the feedback of normed states, and apply the norm",
            "train it with the norm",
        )


def numbering_findings(source: FusedFiles) -> Iterator[Finding]:
    """Yield the faults that the ids of the fused layers show without a target."""
    ids = read_layer_ids(source.files.config)
    if ids is not None and ids == engine_layers(max(ids) + 3):
        yield Finding(
            "layer-ids-numbering",
            "warning",
            f"eagle_aux_hidden_state_layer_ids={ids} look like vLLM's numbers: 2, the middle, "
            "three before the end",
            "SGLang adds one to them, so it would fuse the layers after those; vLLM uses them "
            "unchanged",
            "leave them out, because they are the default of both",
        )
    if ids is not None and len(ids) != NUM_FUSED_LAYERS:
        yield Finding(
            "layer-ids-count",
            "warning",
            f"eagle_aux_hidden_state_layer_ids={ids} names {len(ids)} layers",
            "SGLang fuses three",
            "serve it with vLLM: spectrain convert DIR OUT --to vllm --target TARGET",
        )


def default_numbering_findings(source: FusedFiles, target: TargetFiles) -> Iterator[Finding]:
    """Yield a fault where the ids of the fused layers are vLLM's default."""
    default = engine_layers(target.num_layers)
    if default is not None and read_layer_ids(source.files.config) == default:
        yield Finding(
            "layer-ids-numbering",
            "error",
            f"layer ids are {default}, the default in vLLM's numbers",
            "SGLang adds one to them and fuses the layers after those",
            "leave them out: it is the default of both",
        )


def flat_eagle3_config(export: Export) -> dict[str, Any]:
    """Return the flat config.json without the fused layers."""
    variants = variant_flags(export.drafter)
    layer = drafter_layer_config(export.drafter)
    rope = layer.pop("rope_parameters")
    config = {
        "architectures": [ARCHITECTURES[2 if variants["qk_norm"] else 0]],
        **layer,
        **flat_rope(rope),
        "draft_vocab_size": len(export.tensors["d2t"]),
        **{key: variants[key] for key in NORM_FLAGS},
        "torch_dtype": export.drafter.dtype,
        "use_cache": True,
    }
    return config if export.target is None else config | export.target.special_token_ids


def layer_entries(export: Export) -> dict[str, Any]:
    """Return the entry of the fused layers where they are not the default."""
    layers = export.settings.get("layers")
    default = None if export.target is None else engine_layers(export.target.num_layers)
    if layers in (None, default):
        return {}
    ids = [layer - export.layout.layer_id_offset for layer in layers]
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}}


def eagle3_config(export: Export) -> dict[str, Any]:
    """Return the flat config.json."""
    return flat_eagle3_config(export) | layer_entries(export)


def without_embedding(export: Export) -> dict[str, Tensor]:
    """Return the tensors without the embedding, which engines take from the target."""
    return {name: tensor for name, tensor in export.tensors.items() if name != EMBEDDING}


def check_flat_eagle3(export: Export) -> None:
    """Raise UserError where the flat layout has no key for a setting."""
    engine = export.layout.engine
    variants = variant_flags(export.drafter)
    if variants["norm_output"]:
        raise UserError(
            "norm_output: in the flat layout this flag means a norm before the output layer, "
            "so it cannot describe a drafter that feeds normed states back; use --to vllm"
        )
    unsupported = {
        "num_layers": export.settings["num_layers"] > 1,
        "window": export.settings.get("window") is not None,
        "qk_norm": variants["qk_norm"],
    }
    for key, is_used in unsupported.items():
        if is_used:
            raise UserError(
                f"drafter.{key}: {engine}'s EAGLE-3 is one full-attention layer without "
                "head norms; use --to vllm"
            )
    check_layer_count(export.drafter, export.target, engine)
    if export.has_own_embedding:
        is_known = export.target is not None
        raise UserError(
            f"embed_tokens.weight: {engine} uses the target's embedding, and this drafter has its "
            f"own; {'use --to vllm' if is_known else 'if they are equal, give --target'}"
        )
    if min(export.settings.get("layers") or [1]) < 1 and layer_entries(export):
        raise UserError(
            f"layers: {engine} cannot fuse the stream that enters layer 0; use the format vllm"
        )


def launch_flat_eagle3(
    drafter: DrafterCheckpoint, files: TargetFiles, path: str
) -> dict[str, DrafterLaunch]:
    launches = {"sglang": DrafterLaunch("EAGLE3", path, CHAIN_TOKENS)}
    # vLLM's numbers of other layers are one higher.
    if drafter.drafter.get("layers") in (None, engine_layers(files.num_layers)):
        launches["vllm"] = DrafterLaunch("eagle3", path, CHAIN_TOKENS)
    return launches


ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM")
FLAT_EAGLE3 = FusedLayout(
    title="EAGLE-3, flat layout",
    family=EAGLE3,
    names=eagle3_names("midlayer."),
    matches=is_flat_eagle3,
    parse=parse_flat_eagle3,
    make_config=eagle3_config,
    select_tensors=lambda export: drop_full_maps(without_embedding(export)),
    architectures=ARCHITECTURES,
    layer_id_offset=1,
    replaced_tensors=(EMBEDDING,),
    obstacles=(find_common_obstacle,),
    file_checks=(
        common_findings,
        architecture_findings,
        norm_output_findings,
        numbering_findings,
    ),
    target_checks=(common_target_findings, default_numbering_findings),
    write_checks=(check_flat_eagle3,),
    launches=launch_flat_eagle3,
)
