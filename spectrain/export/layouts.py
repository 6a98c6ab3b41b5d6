"""The table of export layouts. A new layout is its own file and one line here, before any layout
whose `matches_files` accepts its files: help, completion, converter and linter read it.

The table names layouts as text, so that listing the formats imports no layout.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from spectrain.config.missing import explain_missing
from spectrain.errors import UserError, suggest_nearest

from .table import (
    SCORE_WITHOUT_ENGINE,
    TableRow,
    WeightlessExport,
    add_families,
    insert_rows,
    list_packages,
)

if TYPE_CHECKING:
    from .drafter_files import DrafterFiles
    from .layout import Layout


FAMILY_TITLES = {
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
    "medusa": "Medusa",
    "causal": "distilled draft model",
    "pard": "PARD",
    "early_exit": "LayerSkip",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "dflash2": "DFlash2",
    "mtp": "MTP",
    "eagle1": "EAGLE",
    "lilicorr": "LiLiCorr",
    **{family: title for package in list_packages() for family, title in package.titles.items()},
}
"""Family -> its name in texts. Spectrain's own layout holds all of them."""
CORE_LAYOUTS = (
    TableRow("speculators.SPECULATORS_EAGLE3", ("vllm",), ("eagle3",)),
    TableRow("peagle.SPECULATORS_PEAGLE", ("vllm",), ("peagle",)),
    TableRow("dflash_speculators.SPECULATORS_DFLASH", ("vllm",), ("dflash",)),
    TableRow("dflash_speculators.SPECULATORS_DFLASH2", ("vllm",), ("dflash2",)),
    TableRow("dflash_speculators.SPECULATORS_DSPARK", ("vllm",), ("dspark",)),
    TableRow("medusa.VLLM_MEDUSA", ("vllm",), ("medusa",)),
    TableRow("eagle1.NESTED_EAGLE1", (), ()),
    TableRow("eagle1.VLLM_EAGLE1", ("vllm",), ("eagle1",)),
    TableRow("dflash_flat.FLAT_DFLASH2", ("sglang", "flat"), ("dflash2",)),
    TableRow("dflash_flat.FLAT_LILICORR", ("vllm", "sglang", "flat"), ("lilicorr",)),
    TableRow("dflash_flat.FLAT_DSPARK", ("sglang", "flat"), ("dspark",)),
    TableRow("dflash_flat.FLAT_DFLASH", ("sglang", "flat"), ("dflash",)),
    TableRow("eagle1.SGLANG_EAGLE1", ("sglang",), ("eagle1",)),
    TableRow("eagle1.ORIGINAL_EAGLE1", ("eagle",), ("eagle1",)),
    TableRow("medusa.ORIGINAL_MEDUSA", ("medusa",), ("medusa",)),
    TableRow("dflash_flat.TRANSFORMERS_DFLASH", ("hf",), ("dflash",)),
    TableRow("peagle.FLAT_PEAGLE", ("flat",), ("peagle",)),
    TableRow("latent_eagle3.LATENT_EAGLE3", ("mla",), ("eagle3",)),
    TableRow("flat.FLAT_EAGLE3", ("sglang", "flat", "tensorrt"), ("eagle3",)),
    TableRow("medusa.TENSORRT_MEDUSA", ("tensorrt",), ("medusa",)),
    TableRow("mtp.MTP_TARGET", ("mtp",), ("mtp",)),
    TableRow("huggingface.HUGGINGFACE", ("vllm", "sglang", "hf"), ("causal", "pard", "early_exit")),
    TableRow("native.NATIVE", ("spectrain",), tuple(FAMILY_TITLES)),
)
LAYOUTS = insert_rows(
    add_families(CORE_LAYOUTS), (row for package in list_packages() for row in package.rows)
)
"""Every layout; the first one whose `matches_files` is true wins. A format has at most one
layout for each family.
"""
FORMATS = tuple(dict.fromkeys(name for row in LAYOUTS for name in row.formats))
OWN_SUFFIXES = {row.suffix for row in LAYOUTS} - {".safetensors"}
"""Suffixes of files that hold settings and weights together, so that their directory needs no
config.json.
"""
EXPORT_FORMATS = tuple(name for name in FORMATS if name != "spectrain")
TARGET_FORMATS = {
    name: target_format
    for package in list_packages()
    for name, target_format in package.target_formats.items()
}
"""Formats in which a target can be written for its engine."""
SERVING_HINTS = {
    "hybrid": f"no engine has it; {SCORE_WITHOUT_ENGINE}, or export its inner drafter",
    "ngram": (
        'it has no weights; vLLM has its own, --speculative-config \'{"method": "ngram", '
        '"num_speculative_tokens": 4}\''
    ),
    **{
        family: hint
        for package in list_packages()
        for family, hint in package.serving_hints.items()
    },
}
"""Family that no engine can serve from an export -> why, and what to do instead."""


@cache
def load_layout(row: TableRow) -> Layout:
    """Import the file of a row and return its layout."""
    is_absolute = row.path.count(".") > 1
    layout: Layout = resolve_name(row.path if is_absolute else f"{__package__}.{row.path}")
    return layout


def find_row(layout: Layout) -> TableRow:
    """Return the row of a layout, whatever type it writes."""
    return next(row for row in LAYOUTS if load_layout(row).title == layout.title)


def read_files(directory: Path) -> DrafterFiles:
    """Read a drafter's directory, by the layout that has weights with the suffix of its files."""
    if directory.is_file():
        how = (
            "a GGUF model drafts as drafter=causal drafter.model=FILE, which checks it"
            if directory.suffix == ".gguf"
            else "give the directory of a drafter"
        )
        raise UserError(f"{directory}: it is a file and no drafter's directory; {how}")
    has_config = (directory / "config.json").exists()
    suffixes = set() if has_config else {path.suffix for path in directory.glob("*")} & OWN_SUFFIXES
    row = next((row for row in LAYOUTS if row.suffix in suffixes), None)
    if row is not None:
        return load_layout(row).container.read_files(directory)
    from .drafter_files import DrafterFiles

    return DrafterFiles.from_directory(directory)


def detect_layout(files: DrafterFiles) -> Layout:
    """Return the layout of a directory."""
    for layout in map(load_layout, LAYOUTS):
        if layout.matches_files(files):
            return layout
    from spectrain.models.load_errors import describe_adapter

    if (adapter := describe_adapter(files.directory)) is not None:
        raise UserError(
            f"{files.directory}: {adapter}; if it is a drafter, say so by a file "
            f"spectrain.json that holds {{}}"
        )
    titles = ", ".join(load_layout(row).title for row in LAYOUTS)
    raise UserError(
        f"{files.directory}: its config.json has no supported layout; supported are {titles}"
    )


def list_formats(family: str) -> list[str]:
    """Return the formats of engines that can hold a family's drafters."""
    rows = [row for row in LAYOUTS if family in row.families]
    return [name for name in EXPORT_FORMATS if any(name in row.formats for row in rows)]


def find_weightless_export(drafter: str, format_name: str | None) -> WeightlessExport:
    """Return how a drafter without weights is written in a format; raise UserError where it is
    not.
    """
    exports = [export for package in list_packages() for export in package.weightless]
    export = next((export for export in exports if drafter in export.drafters), None)
    if export is None:
        shown = f"`spectrain export drafter={drafter}`"
        names = [name for export in exports for name in export.drafters] or ["those of packages"]
        raise UserError(
            explain_missing("export.drafter", drafter, shown)
            or f"drafter={drafter}: only {' and '.join(names)} are exported without a run; name "
            "the run of another drafter, as in run=runs/NAME"
        )
    if format_name != export.format:
        raise UserError(
            f"format={format_name}: drafter={drafter} has no weights, and only {export.title} "
            f"takes such a drafter from outside; use format={export.format}"
        )
    return export


def require_format(format_name: str) -> None:
    """Raise UserError for a format that does not exist, or that a package has which is not
    installed.
    """
    if format_name not in FORMATS:
        raise UserError(
            explain_missing("format", format_name)
            or f"format={format_name}: there is no such format; "
            f"{suggest_nearest(format_name, FORMATS)}"
        )


def select_layout(family: str, format_name: str, dtype: str | None = None) -> Layout:
    """Return the layout of a format for a family's drafters, or raise UserError saying which format
    to use.

    With `dtype`, its matrices have that type in place of the drafter's own.
    """
    require_format(format_name)
    rows = [row for row in LAYOUTS if family in row.families]
    for row in rows:
        if format_name in row.formats:
            return load_layout(row) if dtype is None else load_layout(row).with_dtype(dtype)
    if family in SERVING_HINTS:
        raise UserError(f"format={format_name}: {family} cannot be served: {SERVING_HINTS[family]}")
    alternatives = list_formats(family)
    if not alternatives:
        raise UserError(
            f"format={format_name}: no layout of an engine supports drafter={family}; "
            f"{SCORE_WITHOUT_ENGINE}"
        )
    raise UserError(
        f"format={format_name}: it does not support drafter={family}; use "
        f"format={' or format='.join(alternatives)}"
    )
