"""The table of export layouts. A new layout is its own file and one line here, before any layout whose
`matches_files` accepts its files: help, completion, converter and linter read it.

The table names classes as text, so that listing the formats imports no layout.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from spectrain.errors import UserError, suggest_nearest

if TYPE_CHECKING:
    from pathlib import Path

    from .layout import DrafterFiles, Layout


@dataclass(frozen=True)
class TableRow:
    """A layout of the table."""

    class_path: str  # module of this package and class
    formats: str  # the values of `format` that write it, separated by spaces; empty for a layout that is only read
    families: str  # the choices of `drafter` that it can hold, separated by spaces
    suffix: str = ".safetensors"  # of its weights; a layout with another one has its own `read_files`


NATIVE_FAMILIES = (
    "eagle3 peagle medusa hydra kangaroo causal pard gated_lora uno early_exit dflash dspark dflash2 mtp amphista ctc eagle1 "
    "gumiho redrafter transformer_heads domino xpress lilicorr vispec"
)
LAYOUTS = (
    TableRow("gguf_eagle3.GgufEagle3", "gguf", "eagle3", ".gguf"),
    TableRow("gguf_dflash.GgufDFlash2", "gguf", "dflash2", ".gguf"),
    TableRow("gguf_dflash.GgufDSpark", "gguf", "dspark", ".gguf"),
    TableRow("gguf_dflash.GgufDFlash", "gguf", "dflash", ".gguf"),
    TableRow("gguf_model.GgufModel", "gguf", "causal", ".gguf"),
    TableRow("openvino.OpenVinoDFlash", "openvino", "dflash"),
    TableRow("openvino.OpenVinoEagle3", "openvino", "eagle3"),
    TableRow("openvino.OpenVinoModel", "openvino", "causal"),
    TableRow("speculators.SpeculatorsEagle3", "vllm", "eagle3"),
    TableRow("peagle.SpeculatorsPEagle", "vllm", "peagle"),
    TableRow("dflash_speculators.SpeculatorsDFlash", "vllm", "dflash"),
    TableRow("dflash_speculators.SpeculatorsDFlash2", "vllm", "dflash2"),
    TableRow("dflash_speculators.SpeculatorsDSpark", "vllm", "dspark"),
    TableRow("dflash_research.SpeculatorsXPress", "speculators", "xpress"),
    TableRow("medusa.VllmMedusa", "vllm", "medusa"),
    TableRow("eagle1.NestedEagle1", "", ""),
    TableRow("eagle1.VllmEagle1", "vllm", "eagle1"),
    TableRow("dflash_flat.FlatDFlash2", "sglang flat", "dflash2"),
    TableRow("dflash_flat.FlatLiLiCorr", "vllm sglang flat", "lilicorr"),
    TableRow("dflash_flat.FlatDSpark", "sglang flat", "dspark"),
    TableRow("dflash_research.FlatDomino", "flat", "domino"),
    TableRow("dflash_research.FlatXPress", "flat", "xpress"),
    TableRow("dflash_research.FlatJetSpec", "jetspec", "dflash"),
    TableRow("dflash_flat.FlatDFlash", "sglang flat", "dflash"),
    TableRow("eagle1.SglangEagle1", "sglang", "eagle1"),
    TableRow("eagle1.OriginalEagle1", "eagle", "eagle1"),
    TableRow("medusa.OriginalMedusa", "medusa", "medusa"),
    TableRow("eagle1.FlatViSpec", "flat", "vispec"),
    TableRow("dflash_flat.TransformersDFlash", "hf", "dflash"),
    TableRow("peagle.FlatPEagle", "flat", "peagle"),
    TableRow("flat.FlatEagle3", "sglang flat tensorrt", "eagle3"),
    TableRow("tensorrt.TensorRtMedusa", "tensorrt", "medusa"),
    TableRow("tensorrt.TensorRtRedrafter", "tensorrt", "redrafter"),
    TableRow("mtp.MtpTargetLayout", "mtp", "mtp"),
    TableRow("huggingface.HuggingFaceLayout", "vllm sglang hf", "causal pard early_exit"),
    TableRow("peft.PeftLayout", "peft", "gated_lora"),
    TableRow("uno.UnoLayout", "uno", "uno"),
    TableRow("native.NativeLayout", "spectrain", NATIVE_FAMILIES),
)
"""Every layout; the first one whose `matches_files` is true wins. A format has at most one layout for each family."""
FORMATS = tuple(dict.fromkeys(name for row in LAYOUTS for name in row.formats.split()))
OWN_SUFFIXES = {row.suffix for row in LAYOUTS} - {".safetensors"}
"""Suffixes of files that hold settings and weights together, so that their directory needs no config.json."""
EXPORT_FORMATS = tuple(name for name in FORMATS if name != "spectrain")
SCORE_WITHOUT_ENGINE = "score it with spectrain eval, which needs no engine"
SERVING_HINTS = {
    **dict.fromkeys(("cascade", "chosen", "hybrid"), f"no engine has it; {SCORE_WITHOUT_ENGINE}, or export its inner drafter"),
    "jacobi": "it has no weights of its own; the target that CLLM trained is RUN/target, in transformers format",
    "ngram": 'it has no weights; vLLM has its own, --speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\'',
}
"""Family that no engine can serve from an export -> why, and what to do instead."""


@cache
def load_layout(row: TableRow) -> Layout:
    """Import the file of a row and return its layout."""
    module, class_name = row.class_path.split(".")
    layout: Layout = getattr(importlib.import_module(f"{__package__}.{module}"), class_name)()
    return layout


def read_files(directory: Path) -> DrafterFiles:
    """Read a drafter's directory, by the layout that has weights with the suffix of its files."""
    has_config = (directory / "config.json").exists()
    suffixes = set() if has_config else {path.suffix for path in directory.glob("*")} & OWN_SUFFIXES
    row = next((row for row in LAYOUTS if row.suffix in suffixes), None)
    if row is not None:
        return load_layout(row).read_files(directory)
    from .layout import DrafterFiles

    return DrafterFiles.from_directory(directory)


def detect_layout(files: DrafterFiles) -> Layout:
    """Return the layout of a directory."""
    for layout in map(load_layout, LAYOUTS):
        if layout.matches_files(files):
            return layout
    from spectrain.models.load_errors import describe_adapter

    if (adapter := describe_adapter(files.directory)) is not None:
        raise UserError(
            f"{files.directory}: {adapter}; if it is an Uno drafter, say so by a file spectrain.json that holds {{}}"
        )
    titles = ", ".join(load_layout(row).title for row in LAYOUTS)
    raise UserError(f"{files.directory}: its config.json has no supported layout; supported are {titles}")


def select_layout(family: str, format_name: str, dtype: str | None = None) -> Layout:
    """Return the layout of a format for a family's drafters, or raise UserError saying which format to use.

    With `dtype`, its matrices have that type in place of the drafter's own.
    """
    if format_name not in FORMATS:
        raise UserError(f"format={format_name}: there is no such format; {suggest_nearest(format_name, FORMATS)}")
    rows = [row for row in LAYOUTS if family in row.families.split()]
    for row in rows:
        if format_name in row.formats.split():
            return load_layout(row) if dtype is None else load_layout(row).with_dtype(dtype)
    if family in SERVING_HINTS:
        raise UserError(f"format={format_name}: {family} cannot be served: {SERVING_HINTS[family]}")
    alternatives = [name for name in EXPORT_FORMATS if any(name in row.formats.split() for row in rows)]
    if not alternatives:
        raise UserError(f"format={format_name}: no layout of an engine supports drafter={family}; {SCORE_WITHOUT_ENGINE}")
    raise UserError(
        f"format={format_name}: it does not support drafter={family}; use format={' or format='.join(alternatives)}"
    )
