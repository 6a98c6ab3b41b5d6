"""The layouts of DFlash's relatives as their authors publish them: JetSpec, Domino and XPress.

No stock engine decodes with them as they were trained; vLLM serves the chain of a JetSpec file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from spectrain.errors import UserError
from spectrain.servers.commands import DrafterLaunch

from .dflash import DOMINO, XPRESS, BlockFamily
from .dflash_flat import CAUSAL_KEYS, FlatDFlash
from .dflash_speculators import SpeculatorsDFlash
from .fused import FusedConfig, flatten_config, require_keys
from .layout import DrafterCheckpoint, DrafterFiles
from .targets import TargetFiles


class FlatJetSpec(FlatDFlash):
    """DFlash's flat layout with causal blocks: both keys that name them are written, and either is read."""

    title = "JetSpec, flat layout"
    engine = "JetSpec"

    def matches_files(self, files: DrafterFiles) -> bool:
        config = files.config.get("dflash_config") or {}
        return super().matches_files(files) and any(config.get(key) for key in CAUSAL_KEYS)

    def check_causality(self, settings: dict[str, Any]) -> None:
        if not settings["causal"] or settings["window"] is not None:
            raise UserError(
                "format=jetspec: it holds drafters with causal blocks and without a window; train recipe=jetspec, or use "
                "format=vllm"
            )

    def extra_config(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        return {"dflash_config": {**super().extra_config(drafter)["dflash_config"], **dict.fromkeys(CAUSAL_KEYS, True)}}

    def drafter_launches(self, drafter: DrafterCheckpoint, files: TargetFiles, path: str) -> dict[str, DrafterLaunch]:
        return {"vllm": super().drafter_launches(drafter, files, path)["vllm"]}


class ResearchLayout(FlatDFlash):
    """The base of flat layouts without a stock engine, for blocks that attend in both directions."""

    def matches_files(self, files: DrafterFiles) -> bool:
        return self.architectures[0] in (files.config.get("architectures") or [])

    def check_causality(self, settings: dict[str, Any]) -> None:
        if settings["causal"] or settings["window"] is not None:
            raise UserError(
                f"drafter.causal={str(settings['causal']).lower()}, drafter.window={settings['window']}: this layout has no "
                "key for them; train with drafter.causal=false drafter.window=null, or use format=spectrain"
            )

    def drafter_launches(self, drafter: DrafterCheckpoint, files: TargetFiles, path: str) -> dict[str, DrafterLaunch]:
        return {}


class FlatDomino(ResearchLayout):
    """SpecForge's layout of Domino: the settings of the correction are in `dflash_config`."""

    title = "Domino, SpecForge's layout"
    engine = "SpecForge"
    family: ClassVar[BlockFamily] = DOMINO
    architectures = ("DominoDraftModel",)

    def parse_config(self, files: DrafterFiles) -> FusedConfig:
        config, keys = super().parse_config(files), flatten_config(files.config)
        require_keys(keys, ("shift_label",))
        return replace(config, settings={**config.settings, "sample_from_anchor": bool(keys["shift_label"])})

    def extra_config(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        entries = super().extra_config(drafter)["dflash_config"]
        return {"dflash_config": {**entries, "shift_label": drafter.drafter["sample_from_anchor"]}}


class FlatXPress(ResearchLayout):
    """The serving layout of XPress: the refiner is `xpress_head`, and its inner width is written instead of a ratio."""

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
        translated = {**keys, "xpress_mlp_ratio": ratio, "num_jacobi_passes": keys["xpress_num_passes"]}
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

    def drafter_launches(self, drafter: DrafterCheckpoint, files: TargetFiles, path: str) -> dict[str, DrafterLaunch]:
        return {}
