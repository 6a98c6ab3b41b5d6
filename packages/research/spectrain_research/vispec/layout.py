"""Automodel's layout of ViSpec, with the flags of a layer without norms before and after it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from spectrain.config.build import GroupSpec
from spectrain.export.drafter_files import DrafterFiles
from spectrain.export.eagle1 import ORIGINAL_EAGLE1, Eagle1Family, eagle1_config
from spectrain.export.fused import Export, FusedFiles
from spectrain.export.fused_config import require_keys
from spectrain.export.native import shape_of_eagle1
from spectrain.export.targets import TargetFiles

FLAGS = {
    "draft_num_hidden_layers": 1,
    "draft_skip_first_input_norm": True,
    "draft_apply_final_norm": False,
    "qkv_bias": False,
}
EAGLE1 = ORIGINAL_EAGLE1.family


@dataclass(frozen=True, kw_only=True)
class ViSpecFamily(Eagle1Family):
    """EAGLE with vectors that stand for an image."""

    choice = "vispec"
    covers = ("num_queries",)
    own_parts: tuple[str, ...] = (*EAGLE1.own_parts, "img_adaptor.", "img_fc.weight")
    fixed_values = {**EAGLE1.fixed_values, **FLAGS}  # noqa: RUF012  (the contract has a Mapping)

    def read_settings(self, source: FusedFiles, own_embedding: bool) -> dict[str, Any]:
        require_keys(source.files.config, ("vispec_num_query_tokens",))
        num_queries = source.files.config["vispec_num_query_tokens"]
        settings = super().read_settings(source, own_embedding)
        return {**settings, "num_queries": num_queries}


def make_config(export: Export) -> dict[str, Any]:
    config = eagle1_config(export)
    has_bias = config.pop("bias")
    queries = {"vispec_num_query_tokens": export.settings["num_queries"]}
    return {**config, **FLAGS, "fc_bias": has_bias, **queries}


FLAT_VISPEC = replace(
    ORIGINAL_EAGLE1,
    title="ViSpec, Automodel's layout",
    family=ViSpecFamily(needs_bias=lambda files: bool(files.config.get("fc_bias", False))),
    make_config=make_config,
    architectures=("VispecDraftModel",),
)


def read_shape(spec: GroupSpec, files: DrafterFiles, target: TargetFiles | None) -> dict[str, Any]:
    """Return what EAGLE has, and the number of an image's vectors."""
    num_queries = spec.with_defaults()["num_queries"]
    return {"num_queries": num_queries, **shape_of_eagle1(spec, files, target)}
