"""The layout of JetSpec as its authors publish it. No stock engine decodes with it as it was
trained; vLLM serves its chain.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spectrain.errors import UserError
from spectrain.export.dflash_flat import (
    CAUSAL_KEYS,
    FLAT_DFLASH,
    check_first_layer,
    check_flat_block,
    dflash_entries,
    is_flat_dflash,
    make_flat_config,
)
from spectrain.export.fused import Export, FusedFiles, launch_with


def is_jetspec(source: FusedFiles) -> bool:
    config = source.files.config.get("dflash_config") or {}
    return is_flat_dflash(source) and any(config.get(key) for key in CAUSAL_KEYS)


def make_config(export: Export) -> dict[str, Any]:
    entries = {**dflash_entries(export), **dict.fromkeys(CAUSAL_KEYS, True)}
    return make_flat_config(export, {"dflash_config": entries})


def check_causality(export: Export) -> None:
    """Raise UserError for blocks that are not causal, or have a window."""
    if not export.settings["causal"] or export.settings["window"] is not None:
        raise UserError(
            "format=jetspec: it holds drafters with causal blocks and without a window; train "
            "recipe=jetspec, or use format=vllm"
        )


# DFlash's flat layout with causal blocks: both keys that name them are written, and either is read.
FLAT_JETSPEC = replace(
    FLAT_DFLASH,
    title="JetSpec, flat layout",
    engine="JetSpec",
    matches=is_jetspec,
    make_config=make_config,
    write_checks=(check_flat_block, check_causality, check_first_layer),
    launches=launch_with({"vllm": "dflash"}, lambda drafter: drafter.drafter["block_size"] - 1),
)
