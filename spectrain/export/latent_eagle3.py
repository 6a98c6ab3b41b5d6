"""EAGLE-3 with latent attention, in the flat layout that vLLM reads for targets of DeepSeek's kind:
DeepSeek's names of tensors and settings, and a dense feed-forward block.

Layer ids are vLLM's: k names the residual stream that enters layer k. The model type is that of
DeepSeek-V2, because vLLM takes a drafter of type deepseek_v3 for the target's own MTP layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spectrain.drafters.layers.llama_layer import LAYER_KEYS
from spectrain.drafters.layers.target_kind import LATENT_KEYS
from spectrain.errors import UserError

from .container import Finding
from .eagle3 import EAGLE3, eagle3_names, variant_flags
from .flat import is_flat_eagle3, layer_entries, read_layer_ids, without_embedding
from .fused import Export, FusedFiles, FusedLayout, launch_with
from .fused_config import EMBEDDING, SIZE_KEYS, FusedConfig, flat_rope, layer_rope, require_keys
from .fused_findings import (
    architecture_findings,
    common_findings,
    common_target_findings,
    find_common_obstacle,
)
from .vocabulary import drop_full_maps

FLAGS = ("norm_before_residual", "fc_norm", "norm_output")
"""The variants that vLLM's class has."""
ARCHITECTURE = "Eagle3DeepseekV2ForCausalLM"
REQUIRED_SIZES = tuple(key for key in LATENT_KEYS if key != "q_lora_rank")


def is_latent_eagle3(source: FusedFiles) -> bool:
    """Tell whether a directory has the flat layout of EAGLE-3, and sizes of latent attention."""
    return source.files.config.get("kv_lora_rank") is not None and is_flat_eagle3(source)


def parse_latent_eagle3(source: FusedFiles) -> FusedConfig:
    """Translate the flat config.json."""
    config = source.files.config
    require_keys(config, (*SIZE_KEYS, *REQUIRED_SIZES))
    return FusedConfig(
        {**config, "head_dim": config["qk_rope_head_dim"]},
        read_layer_ids(config),
        {key: bool(config.get(key, False)) for key in FLAGS} | {"latent_attention": True},
        config.get("draft_vocab_size"),
    )


def latent_eagle3_config(export: Export) -> dict[str, Any]:
    """Return the flat config.json."""
    architecture = export.drafter.drafter["architecture"]
    layer = {key: architecture[key] for key in LAYER_KEYS if key in architecture}
    for key in ("rope_parameters", "head_dim"):
        layer.pop(key, None)
    variants = variant_flags(export.drafter)
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "deepseek_v2",
        "hidden_size": export.tensors["fc.weight"].shape[0],
        **layer,
        **{key: architecture[key] for key in LATENT_KEYS},
        **flat_rope(layer_rope(architecture)),
        "num_hidden_layers": export.settings["num_layers"],
        "vocab_size": len(export.tensors["t2d"]),
        "draft_vocab_size": len(export.tensors["d2t"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **{key: variants[key] for key in FLAGS},
        "torch_dtype": export.drafter.dtype,
        **layer_entries(export),
    }
    return config if export.target is None else config | export.target.special_token_ids


def check_latent_eagle3(export: Export) -> None:
    """Raise UserError where the layout has no form for a setting."""
    if not export.drafter.drafter["architecture"].get("latent_attention"):
        raise UserError(
            "format=mla: this drafter has no latent attention; use format=vllm or format=sglang"
        )
    if variant_flags(export.drafter)["norm_before_fc"]:
        raise UserError(
            "drafter.architecture.norm_before_fc: vLLM's drafter of DeepSeek's kind norms each "
            "fused layer or none; train with fc_norm or without a norm"
        )
    if export.settings.get("window") is not None:
        raise UserError("drafter.window: latent attention in vLLM has no window; train without it")
    if export.has_own_embedding:
        raise UserError(
            "embed_tokens.weight: this layout takes the target's embedding, and this drafter has "
            "its own; train without it"
        )


def latent_findings(source: FusedFiles) -> Iterator[Finding]:
    """Yield a fault of a model type that vLLM takes for something else."""
    if source.files.config.get("model_type") in ("deepseek_v3", "deepseek_v32"):
        yield Finding(
            "mtp-model-type",
            "error",
            f"model_type={source.files.config['model_type']}",
            "vLLM takes a drafter of this type for MTP layers of the target",
            'write "deepseek_v2"',
        )


LATENT_EAGLE3 = FusedLayout(
    title="EAGLE-3 with latent attention, flat layout",
    family=EAGLE3,
    names=eagle3_names("midlayer."),
    matches=is_latent_eagle3,
    parse=parse_latent_eagle3,
    make_config=latent_eagle3_config,
    select_tensors=lambda export: drop_full_maps(without_embedding(export)),
    architectures=(ARCHITECTURE, "Eagle3DeepseekV3ForCausalLM"),
    engine="vLLM",
    other_format=None,
    target_kinds=("latent_attention",),
    replaced_tensors=(EMBEDDING,),
    obstacles=(find_common_obstacle,),
    file_checks=(common_findings, architecture_findings, latent_findings),
    target_checks=(common_target_findings,),
    write_checks=(check_latent_eagle3,),
    launches=launch_with({"vllm": "eagle3"}),
)
