"""What the flat layouts of DFlash's relatives share."""

from __future__ import annotations

from spectrain.errors import UserError
from spectrain.export.dflash_flat import check_first_layer, check_flat_block
from spectrain.export.fused import Export


def check_directions(export: Export) -> None:
    """Raise UserError for blocks that do not attend in both directions."""
    settings = export.settings
    if settings["causal"] or settings["window"] is not None:
        raise UserError(
            f"drafter.causal={str(settings['causal']).lower()}, "
            f"drafter.window={settings['window']}: this layout has no key for them; train "
            "with drafter.causal=false drafter.window=null, or use format=spectrain"
        )


RESEARCH_CHECKS = (check_flat_block, check_directions, check_first_layer)
