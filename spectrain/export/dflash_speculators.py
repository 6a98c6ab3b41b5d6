"""The layouts of block drafters that the speculators library writes and vLLM reads: DFlash,
DSpark and DFlash2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from spectrain.errors import UserError
from spectrain.servers.commands import DrafterLaunch

from .container import Finding
from .dflash import (
    DFLASH,
    DFLASH2,
    DSPARK,
    NAME_PREFIXES,
    OBSTACLES,
    block_family,
    block_findings,
    block_target_findings,
    check_block,
    num_drafts,
    qwen3_layer,
    require_block_keys,
)
from .fused import Export, FusedFiles, FusedLayout, launch_with, rename_prefixes
from .fused_config import FusedConfig, flatten_config
from .layout import DrafterCheckpoint
from .speculators import (
    LAYER,
    NUM_TOKENS,
    Speculators,
    common_entries,
    read_method,
    require_named_target,
    speculators_findings,
)
from .targets import TargetFiles


def parse_block(source: FusedFiles) -> FusedConfig:
    """Translate config.json. The library trains layers with a window causally inside the block,
    unless sliding_window_non_causal, whose default depends on the family.
    """
    config = source.files.config
    family = block_family(source.layout)
    keys = ("block_size", "mask_token_id", "aux_hidden_state_layer_ids", LAYER)
    require_block_keys(flatten_config(config), keys)
    layer = config[LAYER]
    slides = "sliding_attention" in (layer.get("layer_types") or [])
    non_causal = config.get("sliding_window_non_causal", family is not DSPARK)
    settings = {
        "block_size": config["block_size"],
        "mask_token_id": config["mask_token_id"],
        "sample_from_anchor": bool(config.get("sample_from_anchor", family.is_shifted)),
        "causal": slides and not non_causal,
        "window": layer["sliding_window"] if slides else None,
        **family.read_keys(config),
    }
    layers = config["aux_hidden_state_layer_ids"]
    return FusedConfig(layer, layers, {}, config.get("draft_vocab_size"), settings)


def implicit_causality_findings(source: FusedFiles) -> Iterator[Finding]:
    """Yield a fault where a key is missing whose default differs between readers."""
    types = source.files.config[LAYER].get("layer_types")
    is_missing = source.files.config.get("sliding_window_non_causal") is None
    if is_missing and "sliding_attention" in (types or []):
        yield Finding(
            "block-causality-implicit",
            "error",
            "config.json lacks sliding_window_non_causal",
            "the default is true in vLLM and false in the speculators library, so a slot may "
            "attend to other slots than in training",
            "write the value that it was trained with",
        )


def causality_findings(source: FusedFiles) -> Iterator[Finding]:
    """Yield a fault where slots attend to other slots in an engine than in training."""
    types = source.files.config[LAYER].get("layer_types")
    is_causal = source.files.config.get("sliding_window_non_causal") is False
    if is_causal and "sliding_attention" not in (types or []):
        yield Finding(
            "block-causality",
            "error",
            "full-attention layers and sliding_window_non_causal is false",
            "the speculators library trains such layers in both directions regardless, and "
            "vLLM serves them causally",
            'write "sliding_window_non_causal": true, or spectrain convert DIR OUT --to vllm '
            "--target TARGET",
            is_repairable=True,
        )


def window_findings(source: FusedFiles) -> Iterator[Finding]:
    """Yield a fault of a DSpark, from which vLLM reads no causality: it serves layers with a
    window causally and others not.
    """
    settings = source.config.settings
    if settings["window"] is not None and not settings["causal"]:
        yield Finding(
            "block-causality",
            "error",
            "layers with a window and sliding_window_non_causal is true",
            "the speculators library trains them in both directions, and vLLM serves a DSpark "
            "with a window causally",
            "train with sliding_window_non_causal: false, or without a window",
            is_repairable=True,
        )


def token_count_findings(source: FusedFiles) -> Iterator[Finding]:
    """Yield a fault where an engine drafts more than a block."""
    settings = source.config.settings
    num_tokens = read_method(source.files).get("speculative_tokens") or 0
    num_slots = settings["block_size"] - (0 if settings["sample_from_anchor"] else 1)
    if num_tokens > num_slots:
        yield Finding(
            "too-many-tokens",
            "error",
            f"speculative_tokens is {num_tokens}, and a block of {settings['block_size']} "
            f"drafts {num_slots}",
            "engines run longer blocks than it was trained on",
            f"write {num_slots}",
        )


def anchor_findings(source: FusedFiles) -> Iterator[Finding]:
    """Yield a fault of a DSpark whose shift is not written."""
    if source.files.config.get("sample_from_anchor") is None:
        yield Finding(
            "anchor-implicit",
            "error",
            "config.json lacks sample_from_anchor",
            "the default is false in vLLM and true in the speculators library, so every draft "
            "may be one token off",
            "write the value that it was trained with",
        )


def block_config(export: Export) -> dict[str, Any]:
    settings = export.settings
    return {
        **common_entries(export.drafter),
        "block_size": settings["block_size"],
        "aux_hidden_state_layer_ids": settings["layers"],
        "mask_token_id": settings["mask_token_id"],
        "sample_from_anchor": settings["sample_from_anchor"],
        "sliding_window_non_causal": not settings["causal"],
        **block_family(export.layout).config_entries(export.drafter),
        "target_hidden_size": None,
        LAYER: {**qwen3_layer(export.drafter), "architectures": ["Qwen3ForCausalLM"]},
        NUM_TOKENS: num_drafts(export.drafter),
    }


def check_causality(export: Export) -> None:
    """Raise UserError for causal layers without a window."""
    if export.settings["causal"] and export.settings["window"] is None:
        raise UserError(
            "drafter.causal=true: the speculators library trains layers without a window in "
            "both directions and vLLM serves them as the file says, so no value suits both; "
            "train with drafter.window too"
        )


def check_window(export: Export) -> None:
    """Raise UserError for a DSpark with a window that is not causal."""
    if export.settings["window"] is not None and not export.settings["causal"]:
        raise UserError(
            f"drafter.window={export.settings['window']}: vLLM serves a DSpark with a window "
            "causally; train with drafter.causal=true too, or without a window"
        )


def launch_dspark(
    drafter: DrafterCheckpoint, files: TargetFiles, path: str
) -> dict[str, DrafterLaunch]:
    if drafter.drafter["markov_head"] != "vanilla":
        return {}
    return {"vllm": DrafterLaunch("dspark", path, num_drafts(drafter))}


SPECULATORS_DFLASH = FusedLayout(
    title="DFlash, speculators layout",
    family=DFLASH,
    container=Speculators("dflash", "DFlashSpeculator"),
    names=rename_prefixes(NAME_PREFIXES),
    parse=parse_block,
    make_config=block_config,
    obstacles=OBSTACLES,
    file_checks=(
        block_findings,
        speculators_findings,
        implicit_causality_findings,
        causality_findings,
        token_count_findings,
    ),
    target_checks=(block_target_findings,),
    write_checks=(require_named_target, check_block, check_causality),
    launches=launch_with({"vllm": "dflash"}, num_drafts),
)
SPECULATORS_DFLASH2 = replace(
    SPECULATORS_DFLASH,
    title="DFlash2, speculators layout",
    family=DFLASH2,
    container=Speculators("dflash2", "DFlash2DraftModel"),
    # The default of sliding_window_non_causal is true in both readers.
    file_checks=(block_findings, speculators_findings, causality_findings, token_count_findings),
)
SPECULATORS_DSPARK = replace(
    SPECULATORS_DFLASH,
    title="DSpark, speculators layout",
    family=DSPARK,
    container=Speculators("dspark", "DSparkSpeculator"),
    file_checks=(
        block_findings,
        speculators_findings,
        window_findings,
        token_count_findings,
        anchor_findings,
    ),
    write_checks=(require_named_target, check_block, check_causality, check_window),
    launches=launch_dspark,
)
