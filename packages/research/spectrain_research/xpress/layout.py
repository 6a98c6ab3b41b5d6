"""The layouts of XPress: its serving layout and that of the speculators library."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from spectrain.export.dflash import BlockFamily
from spectrain.export.dflash_flat import FlatDFlash
from spectrain.export.dflash_speculators import SpeculatorsDFlash
from spectrain.export.fused import FusedConfig, require_keys
from spectrain.export.layout import DrafterCheckpoint, DrafterFiles
from spectrain.export.native import shape_of_block
from spectrain.export.targets import TargetFiles
from spectrain.servers.commands import DrafterLaunch
from spectrain_research.shared.flat_layout import ResearchLayout

XPRESS = BlockFamily(
    "XPress",
    {"rank": "xpress_rank", "mlp_ratio": "xpress_mlp_ratio", "num_passes": "num_jacobi_passes"},
    ("refiner_head", "xpress_head"),
    module="spectrain_research.xpress.drafter",
)


class FlatXPress(ResearchLayout):
    """The serving layout of XPress: the refiner is `xpress_head`, and its inner width is written
    instead of a ratio.
    """

    title = "XPress, serving layout"
    engine = "vLLM's open pull request"
    family: ClassVar[BlockFamily] = XPRESS
    architectures = ("Qwen3XPressModel",)
    name_prefixes: ClassVar[dict[str, str]] = {
        **FlatDFlash.name_prefixes,
        "refiner_head.token_embed.": "xpress_head.w1.",
        "refiner_head.readout.": "xpress_head.w2.",
        "refiner_head.mlp_gate.": "xpress_head.mlp.gate_proj.",
        "refiner_head.mlp_up.": "xpress_head.mlp.up_proj.",
        "refiner_head.mlp_down.": "xpress_head.mlp.down_proj.",
        "refiner_head.mix_l": "xpress_head.mix.L",
        "refiner_head.": "xpress_head.",
    }

    def parse_config(self, files: DrafterFiles) -> FusedConfig:
        keys = files.config
        require_keys(keys, ("xpress_rank", "xpress_mlp_hidden", "xpress_num_passes"))
        ratio = keys["xpress_mlp_hidden"] // keys["xpress_rank"]
        translated = {
            **keys,
            "xpress_mlp_ratio": ratio,
            "num_jacobi_passes": keys["xpress_num_passes"],
        }
        return super().parse_config(replace(files, config=translated))

    def extra_config(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        settings = drafter.drafter
        return {
            "dflash_config": self.mask_and_layers(drafter),
            "xpress_rank": settings["rank"],
            "xpress_mlp_hidden": settings["rank"] * settings["mlp_ratio"],
            "xpress_block_size": settings["block_size"],
            "xpress_num_passes": settings["num_passes"],
        }


class SpeculatorsXPress(SpeculatorsDFlash):
    """The speculators library's layout of XPress, which training reads and writes."""

    title = "XPress, speculators layout"
    family: ClassVar[BlockFamily] = XPRESS
    model_type = "xpress"
    architectures = ("XPressSpeculator",)

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        return {}


def read_shape(
    drafter: dict[str, Any], files: DrafterFiles, target: TargetFiles | None
) -> dict[str, Any]:
    """Return every setting that other layouts hold, too, with the layer and the fused features
    filled in.
    """
    return shape_of_block(drafter, files, target, XPRESS)
