"""P-EAGLE as files hold it: EAGLE-3 with `mask_hidden`, a mask token and, usually, a trained
embedding; and its two layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from spectrain.drafters.layers.eagle_layers import default_layers
from spectrain.drafters.peagle import NUM_DRAFTS

from .container import Finding
from .drafter_files import DrafterFiles
from .eagle3 import Eagle3Family
from .flat import (
    FLAT_EAGLE3,
    flat_eagle3_config,
    is_flat_eagle3,
    norm_output_findings,
    read_layer_ids,
)
from .fused import Export, FusedFiles, launch_with, select_all
from .fused_findings import architecture_findings, common_findings, common_target_findings
from .speculators import (
    SPECULATORS_EAGLE3,
    Speculators,
    eagle3_config,
    eagle3_findings,
    parse_eagle3,
    read_method,
    speculators_findings,
)
from .targets import TargetFiles

MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Keys that vLLM reads the mask token from, in this order."""


@dataclass(frozen=True, kw_only=True)
class PEagleFamily(Eagle3Family):
    """P-EAGLE; containers differ in where they hold the number of drafts."""

    choice = "peagle"
    read_num_drafts: Callable[[DrafterFiles], int | None]

    def layer_settings(self, source: FusedFiles, own_embedding: bool) -> dict[str, Any]:
        num_drafts = self.read_num_drafts(source.files)
        return {
            "architecture": source.config.architecture,
            "own_embedding": own_embedding,
            "mask_token_id": read_mask_token(source.files),
            **({} if num_drafts is None else {"num_drafts": num_drafts}),
        }


def read_mask_token(files: DrafterFiles) -> Any:
    """Return the id of the mask token, or None where the files name none."""
    return next(
        (files.config[key] for key in MASK_TOKEN_KEYS if files.config.get(key) is not None), None
    )


def mask_token_findings(source: FusedFiles) -> Iterator[Finding]:
    """Yield a fault where the mask token is not in the embedding."""
    token = read_mask_token(source.files)
    rows = source.config.vocab_size
    if not isinstance(token, int) or not 0 <= token < rows:
        yield Finding(
            "mask-token",
            "error",
            f"the mask token is {token}, outside the embedding, which has {rows} rows",
            "engines refuse the file, or read another row",
            "write the id that it was trained with",
        )


def fc_norm_findings(source: FusedFiles) -> Iterator[Finding]:
    """Yield a flag that vLLM does not read here."""
    if source.files.config.get("fc_norm"):
        yield Finding(
            "fc-norm-dropped",
            "warning",
            "fc_norm is on",
            "vLLM 0.32 honours this flag for EAGLE-3 only, and stops at the norms of a P-EAGLE",
            "serve the flat layout: spectrain convert DIR OUT --to flat --target TARGET",
        )


LAUNCHES = launch_with(
    {"vllm": "eagle3"}, lambda drafter: drafter.drafter["num_drafts"], is_parallel=True
)


def speculators_config(export: Export) -> dict[str, Any]:
    extra = {"mask_token_id": export.settings["mask_token_id"]}
    return eagle3_config(
        export.drafter, int(export.settings["num_drafts"]), extra, trains_embedding=True
    )


# Without norm_output: there is no next step to feed normed states to.
SPECULATORS_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm")
SPECULATORS_PEAGLE = replace(
    SPECULATORS_EAGLE3,
    title="P-EAGLE, speculators layout",
    family=PEagleFamily(
        read_num_drafts=lambda files: int(read_method(files).get("speculative_tokens", NUM_DRAFTS))
    ),
    container=Speculators("peagle", "PEagleSpeculator"),
    parse=lambda source: parse_eagle3(source.files, SPECULATORS_FLAGS, implied_flags=()),
    make_config=speculators_config,
    file_checks=(
        common_findings,
        speculators_findings,
        eagle3_findings,
        mask_token_findings,
        fc_norm_findings,
    ),
    launches=LAUNCHES,
)


def is_flat_peagle(source: FusedFiles) -> bool:
    return is_flat_eagle3(source) and (
        "mask_hidden" in source.tensors or read_mask_token(source.files) is not None
    )


def missing_layer_findings(source: FusedFiles) -> Iterator[Finding]:
    """Yield a fault where config.json names no fused layers."""
    if read_layer_ids(source.files.config) is None:
        yield Finding(
            "layer-ids-missing",
            "warning",
            "eagle_aux_hidden_state_layer_ids is missing",
            "vLLM uses its own default",
            "write the layers that it was trained on",
        )


def lower_numbering_findings(source: FusedFiles, target: TargetFiles) -> Iterator[Finding]:
    """Yield a fault where the ids of the fused layers are SGLang's default."""
    lower = [layer - 1 for layer in default_layers(target.num_layers)]
    if read_layer_ids(source.files.config) == lower:
        yield Finding(
            "layer-ids-numbering",
            "warning",
            f"layer ids are {lower}, the default in SGLang's numbering",
            "vLLM, the only engine of P-EAGLE, uses them unchanged and fuses the preceding layers",
            f"write {[layer + 1 for layer in lower]}, unless it was trained on these",
        )


def flat_config(export: Export) -> dict[str, Any]:
    layers = export.settings.get("layers")
    layer_ids = {} if layers is None else {"eagle_aux_hidden_state_layer_ids": layers}
    mask = {"pard_token": export.settings["mask_token_id"]}
    return flat_eagle3_config(export) | layer_ids | mask


# EAGLE-3's flat config.json with `pard_token`, which only vLLM serves. Layer ids are vLLM's, which
# are spectrain's, and the files hold the embedding. `ptd_token_id`, another name of the token, is
# read, too.
FLAT_PEAGLE = replace(
    FLAT_EAGLE3,
    title="P-EAGLE, flat layout",
    family=PEagleFamily(
        read_num_drafts=lambda files: (
            None if "num_drafts" in files.read_metadata().drafter else NUM_DRAFTS
        )
    ),
    matches=is_flat_peagle,
    make_config=flat_config,
    select_tensors=select_all,
    layer_id_offset=0,
    replaced_tensors=(),
    file_checks=(
        common_findings,
        architecture_findings,
        norm_output_findings,
        missing_layer_findings,
        mask_token_findings,
    ),
    target_checks=(common_target_findings, lower_numbering_findings),
    write_checks=(),
    launches=LAUNCHES,
)
