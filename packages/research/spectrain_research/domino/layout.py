"""The layouts of Domino, SpecForge's and SGLang's: the settings of the correction are in
`dflash_config`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spectrain.config.build import GroupSpec
from spectrain.errors import UserError
from spectrain.export.dflash import BlockFamily
from spectrain.export.dflash_flat import (
    FLAT_DFLASH,
    dflash_entries,
    make_flat_config,
    names_architecture,
    parse_flat_block,
)
from spectrain.export.drafter_files import DrafterFiles
from spectrain.export.fused import Export, FusedFiles, no_launches
from spectrain.export.fused_config import FusedConfig, flatten_config, require_keys
from spectrain.export.layout import DrafterCheckpoint
from spectrain.export.native import shape_of_block
from spectrain.export.targets import TargetFiles
from spectrain.servers.commands import DrafterLaunch
from spectrain_research.shared.flat_layout import RESEARCH_CHECKS

DOMINO = BlockFamily(
    "Domino",
    {"rank": "emb_dim", "gru_width": "gru_hidden_dim", "uncorrected": "pure_draft_prefix_len"},
    ("prefix_gru", "embed_proj"),
    {"projector_type": "domino"},
    is_shifted=True,
    allows_draft_vocabulary=False,
)


def parse_config(source: FusedFiles) -> FusedConfig:
    """Translate config.json, in which `shift_label` says whether the anchor drafts."""
    config = parse_flat_block(source)
    keys = flatten_config(source.files.config)
    require_keys(keys, ("shift_label",))
    settings = {**config.settings, "sample_from_anchor": bool(keys["shift_label"])}
    return replace(config, settings=settings)


def make_config(export: Export) -> dict[str, Any]:
    shift = {"shift_label": export.settings["sample_from_anchor"]}
    entries = {"dflash_config": dflash_entries(export) | shift}
    return make_flat_config(export, entries)


def is_sglang_domino(source: FusedFiles) -> bool:
    entries = source.files.config.get("dflash_config") or {}
    return names_architecture(source) and entries.get("projector_type") == "domino"


def check_uncorrected(export: Export) -> None:
    """Raise UserError unless the first draft alone stays DFlash's, which SGLang requires."""
    if export.settings["uncorrected"] != 1:
        raise UserError(
            f"drafter.uncorrected={export.settings['uncorrected']}: SGLang's Domino leaves the "
            "first draft alone uncorrected; use --to flat, or train with drafter.uncorrected=1"
        )


def launch_domino(
    drafter: DrafterCheckpoint, files: TargetFiles, path: str
) -> dict[str, DrafterLaunch]:
    # SGLang chooses among 2,048 candidates unless told to choose among all tokens, as we do.
    options = {"--speculative-domino-candidate-pool-size": 0}
    count = drafter.drafter["block_size"] - 1
    return {"sglang": DrafterLaunch("DFLASH", path, count, options=options)}


FLAT_DOMINO = replace(
    FLAT_DFLASH,
    title="Domino, SpecForge's layout",
    family=DOMINO,
    engine="SpecForge",
    other_format=None,
    matches=names_architecture,
    parse=parse_config,
    make_config=make_config,
    architectures=("DominoDraftModel",),
    write_checks=RESEARCH_CHECKS,
    launches=no_launches,
)
SGLANG_DOMINO = replace(
    FLAT_DOMINO,
    title="Domino, SGLang's layout",
    engine="SGLang",
    matches=is_sglang_domino,
    architectures=("DFlashDraftModel",),
    write_checks=(*RESEARCH_CHECKS, check_uncorrected),
    launches=launch_domino,
)


def read_shape(spec: GroupSpec, files: DrafterFiles, target: TargetFiles | None) -> dict[str, Any]:
    """Return every setting that other layouts hold, too, with the layer and the fused features
    filled in.
    """
    return shape_of_block(spec, files, target, DOMINO)
