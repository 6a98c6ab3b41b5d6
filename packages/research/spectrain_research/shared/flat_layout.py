"""The base of the flat layouts of DFlash's relatives that no stock engine decodes with."""

from __future__ import annotations

from typing import Any

from spectrain.errors import UserError
from spectrain.export.dflash_flat import FlatDFlash
from spectrain.export.layout import DrafterCheckpoint, DrafterFiles
from spectrain.export.targets import TargetFiles
from spectrain.servers.commands import DrafterLaunch


class ResearchLayout(FlatDFlash):
    """The base of flat layouts without a stock engine, for blocks that attend in both
    directions.
    """

    def matches_files(self, files: DrafterFiles) -> bool:
        return self.architectures[0] in (files.config.get("architectures") or [])

    def check_causality(self, settings: dict[str, Any]) -> None:
        if settings["causal"] or settings["window"] is not None:
            raise UserError(
                f"drafter.causal={str(settings['causal']).lower()}, "
                f"drafter.window={settings['window']}: this layout has no key for them; train "
                "with drafter.causal=false drafter.window=null, or use format=spectrain"
            )

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        return {}
