"""SpecForge's layout of Domino."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from spectrain.export.dflash import BlockFamily
from spectrain.export.fused import FusedConfig, flatten_config, require_keys
from spectrain.export.layout import DrafterCheckpoint, DrafterFiles
from spectrain.export.native import shape_of_block
from spectrain.export.targets import TargetFiles
from spectrain_research.shared.flat_layout import ResearchLayout

DOMINO = BlockFamily(
    "Domino",
    {"rank": "emb_dim", "gru_width": "gru_hidden_dim", "uncorrected": "pure_draft_prefix_len"},
    ("prefix_gru", "embed_proj"),
    {"projector_type": "domino"},
    is_shifted=True,
    allows_draft_vocabulary=False,
    module="spectrain_research.domino.drafter",
)


class FlatDomino(ResearchLayout):
    """SpecForge's layout of Domino: the settings of the correction are in `dflash_config`."""

    title = "Domino, SpecForge's layout"
    engine = "SpecForge"
    family: ClassVar[BlockFamily] = DOMINO
    architectures = ("DominoDraftModel",)

    def parse_config(self, files: DrafterFiles) -> FusedConfig:
        config = super().parse_config(files)
        keys = flatten_config(files.config)
        require_keys(keys, ("shift_label",))
        return replace(
            config, settings={**config.settings, "sample_from_anchor": bool(keys["shift_label"])}
        )

    def extra_config(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        entries = super().extra_config(drafter)["dflash_config"]
        return {"dflash_config": {**entries, "shift_label": drafter.drafter["sample_from_anchor"]}}


def read_shape(
    drafter: dict[str, Any], files: DrafterFiles, target: TargetFiles | None
) -> dict[str, Any]:
    """Return every setting that other layouts hold, too, with the layer and the fused features
    filled in.
    """
    return shape_of_block(drafter, files, target, DOMINO)
