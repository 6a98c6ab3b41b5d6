"""Automodel's layout of ViSpec."""

from __future__ import annotations

from typing import Any, ClassVar

from spectrain.config.build import GroupSpec
from spectrain.export.eagle1 import OriginalEagle1
from spectrain.export.fused import FusedConfig, require_keys
from spectrain.export.layout import DrafterCheckpoint, DrafterFiles
from spectrain.export.native import shape_of_eagle1
from spectrain.export.targets import TargetFiles


class FlatViSpec(OriginalEagle1):
    """Automodel's layout of ViSpec, with the flags of a layer without norms before and after it."""

    title = "ViSpec, Automodel's layout"
    constructor = "spectrain_research.vispec.drafter.ViSpec"
    architectures = ("VispecDraftModel",)
    own_parts = (*OriginalEagle1.own_parts, "img_adaptor.", "img_fc.weight")
    fixed_values: ClassVar[dict[str, Any]] = {
        **OriginalEagle1.fixed_values,
        "draft_num_hidden_layers": 1,
        "draft_skip_first_input_norm": True,
        "draft_apply_final_norm": False,
        "qkv_bias": False,
    }

    @property
    def choice(self) -> str:
        return "drafter=vispec"

    @property
    def covers(self) -> tuple[str, ...]:
        return ("num_queries",)

    def class_settings(
        self, config: FusedConfig, files: DrafterFiles, own_embedding: bool
    ) -> dict[str, Any]:
        require_keys(files.config, ("vispec_num_query_tokens",))
        num_queries = files.config["vispec_num_query_tokens"]
        return {**super().class_settings(config, files, own_embedding), "num_queries": num_queries}

    def needs_bias(self, files: DrafterFiles) -> bool:
        return bool(files.config.get("fc_bias", False))

    def _make_config(self, drafter: DrafterCheckpoint, vocab: int, bias: bool) -> dict[str, Any]:
        config = super()._make_config(drafter, vocab, bias)
        del config["bias"]
        own = {
            key: value
            for key, value in self.fixed_values.items()
            if key.startswith("draft_") or key == "qkv_bias"
        }
        return {
            **config,
            **own,
            "fc_bias": bias,
            "vispec_num_query_tokens": drafter.drafter["num_queries"],
        }


def read_shape(
    drafter: dict[str, Any], files: DrafterFiles, target: TargetFiles | None
) -> dict[str, Any]:
    """Return what EAGLE has, and the number of an image's vectors."""
    settings = GroupSpec.from_node("drafter", drafter).with_defaults()
    return {"num_queries": settings["num_queries"], **shape_of_eagle1(drafter, files, target)}
