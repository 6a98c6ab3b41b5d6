"""The flat layouts of block drafters: DFlash and DFlash2 as z-lab publishes them and DSpark as
DeepSpec does, which SGLang and vLLM read, and DFlash for transformers.

Layer ids number a layer's output, one less than the stream entering the next layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from spectrain.errors import UserError
from spectrain.servers.commands import DrafterLaunch

from .container import Finding
from .dflash import (
    DFLASH,
    DFLASH2,
    DSPARK,
    LILICORR,
    NAME_PREFIXES,
    OBSTACLES,
    block_family,
    block_findings,
    block_target_findings,
    check_block,
    qwen3_layer,
    refuse_draft_vocabulary,
    require_block_keys,
)
from .fused import Export, FusedFiles, FusedLayout, launch_with, no_launches, rename_prefixes
from .fused_config import (
    EMBEDDING,
    HEAD,
    FusedConfig,
    flat_rope,
    flatten_config,
)
from .fused_findings import architecture_findings
from .huggingface import generate_snippet
from .layout import DrafterCheckpoint, require_target
from .targets import TargetFiles

CAUSAL_KEYS = ("causal", "causal_head")
"""Keys that say that a block attends causally: the one that vLLM reads, and JetSpec's own."""
DEEPSPEC_ARCHITECTURE = "Qwen3DSparkModel"  # DeepSpec's DFlash has it, too, with markov_rank 0
TRANSFORMERS_TYPE = "muse_glimmer_assistant"


def is_flat_dflash(source: FusedFiles) -> bool:
    is_block = source.has_architecture or "dflash_config" in source.files.config
    return is_block and "speculators_model_type" not in source.files.config


def names_architecture(source: FusedFiles) -> bool:
    """Tell whether config.json names the very class that the layout writes."""
    return source.layout.architectures[0] in (source.files.config.get("architectures") or [])


def is_flat_dspark(source: FusedFiles) -> bool:
    return (
        names_architecture(source)
        and source.files.config.get("markov_rank") != 0
        and "speculators_model_type" not in source.files.config
    )


def parse_flat_block(source: FusedFiles) -> FusedConfig:
    """Translate a flat config.json, whose `dflash_config` may hold some of the keys."""
    config = flatten_config(source.files.config)
    require_block_keys(config, ("block_size", "mask_token_id", "target_layer_ids"))
    slides = "sliding_attention" in (config.get("layer_types") or [])
    window = None
    if slides or config.get("use_swa"):
        window = config.get("swa_window_size") or config["sliding_window"]
    flags = [config.get(key) for key in ("is_causal", *CAUSAL_KEYS)]
    causal = next(value for value in (*flags, slides) if value is not None)
    shifted = config.get(
        "sample_from_anchor", DEEPSPEC_ARCHITECTURE in (config.get("architectures") or [])
    )
    settings = {
        "block_size": config["block_size"],
        "mask_token_id": config["mask_token_id"],
        "sample_from_anchor": bool(shifted),
        "causal": bool(causal),
        "window": window,
        **block_family(source.layout).read_keys(config),
    }
    layers = [layer + source.layout.layer_id_offset for layer in config["target_layer_ids"]]
    return FusedConfig(config, layers, {}, config.get("draft_vocab_size"), settings)


def ignored_head_findings(source: FusedFiles) -> Iterator[Finding]:
    """Yield tensors that SGLang does not read."""
    ignored = [name for name in (HEAD, EMBEDDING) if name in source.tensors]
    if ignored and DEEPSPEC_ARCHITECTURE not in (source.files.config.get("architectures") or []):
        yield Finding(
            "ignored-head",
            "error",
            f"the files hold {' and '.join(ignored)}",
            "SGLang silently uses the target's instead; only vLLM reads them",
            "serve it with vLLM: spectrain convert DIR OUT --to vllm --target TARGET",
            is_repairable=True,
        )


def make_flat_config(export: Export, entries: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with these entries, which do not describe the layers."""
    layer = qwen3_layer(export.drafter)
    rope = layer.pop("rope_parameters")
    return {
        "architectures": [export.layout.architectures[0]],
        **layer,
        **flat_rope(rope),
        "num_target_layers": None if export.target is None else export.target.num_layers,
        "block_size": export.settings["block_size"],
        **entries,
        "torch_dtype": export.drafter.dtype,
        "use_cache": True,
    }


def mask_and_layers(export: Export) -> dict[str, Any]:
    """Return the entries of the mask token and the fused layers."""
    return {
        "mask_token_id": export.settings["mask_token_id"],
        "target_layer_ids": [layer - 1 for layer in export.settings["layers"]],
    }


def dflash_entries(export: Export) -> dict[str, Any]:
    """Return the content of `dflash_config`."""
    family = block_family(export.layout)
    return {**mask_and_layers(export), **family.config_entries(export.drafter)}


def dflash_config(export: Export) -> dict[str, Any]:
    entries = {"dflash_config": dflash_entries(export)}
    return make_flat_config(export, entries)


def own_tensors(export: Export) -> dict[str, Tensor]:
    """Return the tensors without the vocabulary's, which engines take from the target."""
    shared = ("d2t", "t2d", EMBEDDING)
    return {name: tensor for name, tensor in export.tensors.items() if name not in shared}


def check_flat_block(export: Export) -> None:
    """Raise UserError for a vocabulary of its own, which engines take from the target."""
    check_block(export)
    engine = export.layout.engine
    remedy = f"{export.layout.other_remedy}train"
    refuse_draft_vocabulary(
        export.drafter, f"{engine} uses the target's full output layer; {remedy}"
    )
    if export.has_own_embedding:
        raise UserError(
            f"{EMBEDDING}: {engine} uses the target's embedding, and this drafter has "
            f"its own; {remedy} with drafter.own_embedding=false"
        )


def check_causality(export: Export) -> None:
    """Raise UserError where readers would attend to other slots of a block than in training."""
    settings = export.settings
    if settings["causal"] != (settings["window"] is not None):
        raise UserError(
            f"drafter.causal={str(settings['causal']).lower()}, "
            f"drafter.window={settings['window']}: SGLang treats layers with a window as "
            f"causal and others as not; {export.layout.other_remedy}train with both or none"
        )


def check_first_layer(export: Export) -> None:
    """Raise UserError where the drafter reads the embedding's stream, which has no number."""
    if min(export.settings["layers"]) < 1:
        raise UserError(
            "layers: target_layer_ids cannot number the stream entering layer 0; "
            f"{export.layout.other_remedy}train with drafter.layers from 1 on"
        )


FLAT_CHECKS = (check_flat_block, check_causality, check_first_layer)
# Full-attention layers attend to the block in both directions, sliding ones causally.
FLAT_DFLASH = FusedLayout(
    title="DFlash, flat layout",
    family=DFLASH,
    names=rename_prefixes(NAME_PREFIXES),
    matches=is_flat_dflash,
    parse=parse_flat_block,
    make_config=dflash_config,
    select_tensors=own_tensors,
    architectures=("DFlashDraftModel", DEEPSPEC_ARCHITECTURE),
    architecture_prefix="DFlash",
    layer_id_offset=1,
    obstacles=OBSTACLES,
    file_checks=(block_findings, architecture_findings, ignored_head_findings),
    target_checks=(block_target_findings,),
    write_checks=FLAT_CHECKS,
    launches=launch_with(
        {"sglang": "DFLASH", "vllm": "dflash"}, lambda drafter: drafter.drafter["block_size"] - 1
    ),
)
FLAT_DFLASH2 = replace(
    FLAT_DFLASH,
    title="DFlash2, flat layout",
    family=DFLASH2,
    matches=names_architecture,
    architectures=("DFlash2DraftModel",),
)


def check_top_k(export: Export) -> None:
    """Raise UserError for a number of candidates that engines lack."""
    if export.settings["top_k"] not in (1, 2, 4, 8, 16):
        raise UserError(
            f"drafter.top_k={export.settings['top_k']}: engines need a power of two up to 16"
        )


FLAT_LILICORR = replace(
    FLAT_DFLASH2,
    title="LiLiCorr, flat layout",
    family=LILICORR,
    other_format=None,
    architectures=("LiLiCorrDraftModel",),
    write_checks=(*FLAT_CHECKS, check_top_k),
)


def check_anchor(export: Export) -> None:
    """Raise UserError for blocks whose anchor drafts nothing."""
    if not export.settings["sample_from_anchor"]:
        raise UserError(
            "drafter.sample_from_anchor=false: DeepSpec's layout of DSpark has no key for it, "
            "and in engines every slot drafts the token after its own position; use --to vllm"
        )


def dspark_config(export: Export) -> dict[str, Any]:
    entries = {
        **mask_and_layers(export),
        "num_anchors": export.settings.get("num_anchors", 512),
        **DSPARK.config_entries(export.drafter),
    }
    return make_flat_config(export, entries)


def with_target_tensors(export: Export) -> dict[str, Tensor]:
    """Return the tensors with the target's embedding and output layer."""
    target = require_target(export.target, "the files hold its two layers of tokens")
    dtype = export.tensors["fc.weight"].dtype
    borrowed = {EMBEDDING: target.load_embedding().to(dtype), HEAD: target.load_head().to(dtype)}
    return own_tensors(export) | borrowed


def launch_dspark(
    drafter: DrafterCheckpoint, files: TargetFiles, path: str
) -> dict[str, DrafterLaunch]:
    size = drafter.drafter["block_size"]
    launches = {"sglang": DrafterLaunch("DSPARK", path, size)}
    if drafter.drafter["markov_head"] == "vanilla":
        launches["vllm"] = DrafterLaunch("dspark", path, size)
    return launches


# All keys are at the top level.
FLAT_DSPARK = replace(
    FLAT_DFLASH,
    title="DSpark, flat layout",
    family=DSPARK,
    matches=is_flat_dspark,
    make_config=dspark_config,
    select_tensors=with_target_tensors,
    architectures=(DEEPSPEC_ARCHITECTURE,),
    replaced_tensors=(EMBEDDING, HEAD),
    write_checks=(check_anchor, *FLAT_CHECKS),
    launches=launch_dspark,
)


def refuse_window(export: Export) -> None:
    """Raise UserError for a window, which transformers applies to both sides."""
    if export.settings["window"] is not None:
        raise UserError(
            f"drafter.window={export.settings['window']}: transformers applies a window to "
            "both sides of a slot; use --to vllm, or train with drafter.window=null"
        )


def transformers_config(export: Export) -> dict[str, Any]:
    layer = qwen3_layer(export.drafter)
    return {
        **{key: value for key, value in layer.items() if "sliding" not in key},
        "model_type": TRANSFORMERS_TYPE,
        "architectures": [export.layout.architectures[0]],
        "block_size": export.settings["block_size"],
        **mask_and_layers(export),
        "dtype": export.drafter.dtype,
        **({} if export.target is None else export.target.special_token_ids),
    }


def assistant_snippet(drafter: DrafterCheckpoint, target: str, path: str) -> dict[str, str]:
    assistant = f'assistant_model=AutoModel.from_pretrained("{path}"), speculation_type="dflash"'
    classes = "AutoModel, AutoModelForCausalLM, AutoTokenizer"
    return {"transformers": generate_snippet(target, assistant, classes)}


# A block attends in both directions, and embedding and output layer are always the target's.
TRANSFORMERS_DFLASH = replace(
    FLAT_DFLASH,
    title="DFlash, transformers",
    names=rename_prefixes(
        {
            **NAME_PREFIXES,
            "fc.": "encoder.fc.",
            "hidden_norm.": "encoder.output_norm_enc.",
        }
    ),
    matches=lambda source: source.files.config.get("model_type") == TRANSFORMERS_TYPE,
    make_config=transformers_config,
    architectures=("MuseGlimmerAssistantModel",),
    file_checks=(block_findings,),
    write_checks=(*FLAT_CHECKS, refuse_window),
    launches=no_launches,
    snippets=assistant_snippet,
)
