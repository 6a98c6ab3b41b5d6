"""Conversion of drafters: read one in any layout, write it in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from spectrain.config.build import save_groups
from spectrain.drafters.layers.target_kind import KIND_VARIANTS
from spectrain.errors import RunError, UserError, first_line
from spectrain.files import atomic_write, refuse_nonempty
from spectrain.provenance import package_versions

from .drafter_files import METADATA_FILE, write_json
from .file_checks import NOT_DATA
from .layout import (
    DESCRIPTION_KEYS,
    MALFORMED_ERRORS,
    DrafterCheckpoint,
    Layout,
)
from .layouts import detect_layout, read_files, select_layout
from .linter import check_files, check_settings
from .targets import TargetFiles

LAYOUT_SETTINGS = (
    "architecture",
    "layers",
    "vocab_size",
    "num_layers",
    "model",
    "block_size",
    "sample_from_anchor",
    "causal",
    "window",
    "mask_token_id",
    "own_embedding",
)
"""Settings of drafters that every layout that has them writes into its own files, so that
spectrain.json never holds them.

A setting of one family is in the `covers` of its layouts instead; one that is in neither comes back
from spectrain.json.
"""


def read_drafter(directory: Path, target: TargetFiles | None = None) -> DrafterCheckpoint:
    """Read a drafter in any supported layout; raise UserError at the first fault that is an
    error and not repairable.
    """
    files = read_files(directory)
    layout = detect_layout(files)
    for finding in check_files(files, layout, None):
        if finding.name == NOT_DATA:
            raise UserError(f"{finding.problem}; {finding.remedy}")
        if finding.level == "error" and not finding.is_repairable:
            raise UserError(f"{directory}: {finding.problem} ({finding.name}); {finding.remedy}")
    try:
        drafter = layout.read(files, target)
        check_settings(files, drafter)
        return drafter
    except UserError:
        raise
    except KeyError as error:
        raise UserError(
            f"{directory}: {error} is missing; run spectrain lint {directory}"
        ) from error
    except MALFORMED_ERRORS as error:
        raise UserError(
            f"{directory}: its files do not hold a drafter ({first_line(error)}); copy them again"
        ) from error


def check_target_kinds(drafter: DrafterCheckpoint, layout: Layout) -> None:
    """Raise UserError for a part of the target's kind that a layout has no form for."""
    architecture = drafter.drafter.get("architecture") or {}
    for key in KIND_VARIANTS:
        if architecture.get(key) and key not in layout.target_kinds:
            raise UserError(
                f"drafter.architecture.{key}=true: {layout.title} has Llama's or Qwen3's layers "
                "alone; use format=mla for an EAGLE-3 with latent attention, or train without it"
            )


def write_drafter(
    drafter: DrafterCheckpoint, layout: Layout, target: TargetFiles | None, directory: Path
) -> None:
    """Write a drafter into a folder, with spectrain.json for what the layout has no key for."""
    if not layout.covers_all:
        check_target_kinds(drafter, layout)
        drafter = drafter.expand_heads()
    layout.write(drafter, target, directory)
    if layout.covers_all:
        return
    metadata: dict[str, Any] = {
        "drafter": {
            key: value
            for key, value in drafter.drafter.items()
            if key not in (*LAYOUT_SETTINGS, *layout.covers)
        },
        "description": save_groups(
            {k: drafter.description[k] for k in DESCRIPTION_KEYS if drafter.description.get(k)}
        ),
        "spectrain_version": package_versions().get("spectrain"),
    }
    if "mask_row" in drafter.description:
        metadata["mask_row"] = drafter.description["mask_row"]
    if target is not None:
        metadata["target"] = {
            "said": target.reference,
            "name": target.name,
            "tokenizer": target.template_hash(),
        }
    if drafter.is_target:
        metadata["exits"] = read_exits(drafter)
    write_json(directory / METADATA_FILE, metadata)


def write_checked(
    drafter: DrafterCheckpoint, layout: Layout, target: TargetFiles, directory: Path
) -> None:
    """Write a drafter into a folder; raise a RunError if the linter finds that an engine would
    not serve it.
    """
    write_drafter(drafter, layout, target, directory)
    if drafter.is_target or layout.holds_target:
        return
    require_servable(directory, target)


def require_servable(directory: Path, target: TargetFiles) -> None:
    """Raise a RunError if the linter finds that an engine would not serve what was written."""
    files = read_files(directory)
    for finding in check_files(files, detect_layout(files), target):
        if finding.level == "error":
            raise RunError(
                f"{directory}: what was written would not serve: {finding.problem} "
                f"({finding.name}); {finding.remedy}"
            )


def resolve_target(drafter: DrafterCheckpoint) -> TargetFiles:
    """Return the target that a drafter's own files name: the trained one, if there is one."""
    if drafter.trained_target is not None:
        return TargetFiles(str(drafter.trained_target))
    settings = drafter.description.get("target")
    if settings:
        return TargetFiles.from_settings(settings, may_download=False)
    if drafter.target is None:
        raise UserError(
            "target: the drafter's files do not say which target it is for; say it, as in "
            "target=tiny"
        )
    return TargetFiles(drafter.target, may_download=False)


def read_exits(drafter: DrafterCheckpoint) -> dict[str, Any]:
    """Return the early exits that a target was trained for, as counts of executed layers, which
    is transformers' numbering.
    """
    assert drafter.trained_target is not None
    count = (
        AutoConfig.from_pretrained(drafter.trained_target, trust_remote_code=False)
        .get_text_config()
        .num_hidden_layers
    )
    return {"trained": list(range(1, count)), "default": drafter.drafter.get("exit_layer")}


def convert(
    source: Path, out: Path, format_name: str, target: TargetFiles | None, dtype: str | None = None
) -> Path:
    """Read a drafter and write it in another layout, bit for bit without `dtype`; only low-rank
    output layers are multiplied out."""
    refuse_nonempty(out)
    drafter = read_drafter(source, target)
    if target is None and drafter.target is not None:
        target = TargetFiles(drafter.target, may_download=False)
    layout = select_layout(drafter.family, format_name, dtype)
    with atomic_write(out, folder=True, is_new=True) as scratch:
        write_drafter(drafter, layout, target, scratch)
    return out
