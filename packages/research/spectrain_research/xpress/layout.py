"""The layouts of XPress: the flat one, which vLLM serves, and that of the speculators library."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spectrain.config.build import GroupSpec
from spectrain.errors import UserError
from spectrain.export.dflash import NAME_PREFIXES, BlockFamily, num_drafts
from spectrain.export.dflash_flat import (
    FLAT_DFLASH,
    make_flat_config,
    mask_and_layers,
    names_architecture,
    parse_flat_block,
)
from spectrain.export.dflash_speculators import SPECULATORS_DFLASH
from spectrain.export.drafter_files import DrafterFiles
from spectrain.export.fused import (
    Export,
    FusedFiles,
    launch_with,
    no_launches,
    rename_prefixes,
)
from spectrain.export.fused_config import FusedConfig, require_keys
from spectrain.export.native import shape_of_block
from spectrain.export.speculators import Speculators
from spectrain.export.targets import TargetFiles
from spectrain_research.shared.flat_layout import RESEARCH_CHECKS

XPRESS = BlockFamily(
    "XPress",
    {"rank": "xpress_rank", "mlp_ratio": "xpress_mlp_ratio", "num_passes": "num_jacobi_passes"},
    ("refiner_head", "xpress_head"),
)
SERVING_PREFIXES = {
    **NAME_PREFIXES,
    "refiner_head.token_embed.": "xpress_head.w1.",
    "refiner_head.readout.": "xpress_head.w2.",
    "refiner_head.mlp_gate.": "xpress_head.mlp.gate_proj.",
    "refiner_head.mlp_up.": "xpress_head.mlp.up_proj.",
    "refiner_head.mlp_down.": "xpress_head.mlp.down_proj.",
    "refiner_head.mix_l": "xpress_head.mix.L",
    "refiner_head.": "xpress_head.",
}


def parse_config(source: FusedFiles) -> FusedConfig:
    """Translate config.json, which holds the refiner's inner width instead of a ratio."""
    keys = source.files.config
    require_keys(keys, ("xpress_rank", "xpress_mlp_hidden", "xpress_num_passes"))
    translated = {
        **keys,
        "xpress_mlp_ratio": keys["xpress_mlp_hidden"] // keys["xpress_rank"],
        "num_jacobi_passes": keys["xpress_num_passes"],
    }
    return parse_flat_block(replace(source, files=replace(source.files, config=translated)))


def make_config(export: Export) -> dict[str, Any]:
    settings = export.settings
    entries = {
        "dflash_config": mask_and_layers(export),
        "xpress_rank": settings["rank"],
        "xpress_mlp_hidden": settings["rank"] * settings["mlp_ratio"],
        "xpress_block_size": settings["block_size"],
        "xpress_num_passes": settings["num_passes"],
        # vLLM chooses among 512 candidates unless told to choose among all tokens, as we do.
        "xpress_topc": 0,
    }
    return make_flat_config(export, entries)


def check_anchor(export: Export) -> None:
    """Raise UserError for blocks whose anchor drafts, which vLLM refuses."""
    if export.settings["sample_from_anchor"]:
        raise UserError(
            "drafter.sample_from_anchor=true: vLLM's XPress drafts from the slots after the "
            "anchor; train with drafter.sample_from_anchor=false"
        )


FLAT_XPRESS = replace(
    FLAT_DFLASH,
    title="XPress, flat layout",
    family=XPRESS,
    engine="vLLM",
    other_format=None,
    names=rename_prefixes(SERVING_PREFIXES),
    matches=names_architecture,
    parse=parse_config,
    make_config=make_config,
    architectures=("Qwen3XPressModel",),
    write_checks=(*RESEARCH_CHECKS, check_anchor),
    launches=launch_with({"vllm": "dflash"}, num_drafts),
)
# The speculators library's layout, which training reads and writes.
SPECULATORS_XPRESS = replace(
    SPECULATORS_DFLASH,
    title="XPress, speculators layout",
    family=XPRESS,
    container=Speculators("xpress", "XPressSpeculator"),
    launches=no_launches,
)


def read_shape(spec: GroupSpec, files: DrafterFiles, target: TargetFiles | None) -> dict[str, Any]:
    """Return every setting that other layouts hold, too, with the layer and the fused features
    filled in.
    """
    return shape_of_block(spec, files, target, XPRESS)
