"""The layout of JetSpec as its authors publish it. No stock engine decodes with it as it was
trained; vLLM serves its chain.
"""

from __future__ import annotations

from typing import Any

from spectrain.errors import UserError
from spectrain.export.dflash_flat import CAUSAL_KEYS, FlatDFlash
from spectrain.export.layout import DrafterCheckpoint, DrafterFiles
from spectrain.export.targets import TargetFiles
from spectrain.servers.commands import DrafterLaunch


class FlatJetSpec(FlatDFlash):
    """DFlash's flat layout with causal blocks: both keys that name them are written, and either
    is read.
    """

    title = "JetSpec, flat layout"
    engine = "JetSpec"

    def matches_files(self, files: DrafterFiles) -> bool:
        config = files.config.get("dflash_config") or {}
        return super().matches_files(files) and any(config.get(key) for key in CAUSAL_KEYS)

    def check_causality(self, settings: dict[str, Any]) -> None:
        if not settings["causal"] or settings["window"] is not None:
            raise UserError(
                "format=jetspec: it holds drafters with causal blocks and without a window; train "
                "recipe=jetspec, or use format=vllm"
            )

    def extra_config(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        return {
            "dflash_config": {
                **super().extra_config(drafter)["dflash_config"],
                **dict.fromkeys(CAUSAL_KEYS, True),
            }
        }

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        return {"vllm": super().drafter_launches(drafter, files, path)["vllm"]}
