"""Uno (arXiv 2609.04010): LoRA at uniformly random tokens, so that the frozen target predicts
its own next tokens there.
"""

from __future__ import annotations

from dataclasses import dataclass

from spectrain.drafters.capabilities import SavedFiles
from spectrain.models.target import Target
from spectrain_research.shared.gated_masks import GatedMasks, MaskConfig
from spectrain_research.shared.mask_drafter import Strategy


@dataclass(frozen=True, kw_only=True)
class UnoConfig(MaskConfig):
    """Settings of Uno."""

    # Where random tokens run: in a forward of their own before verification (apart), behind every
    # tree node (quadratic), or behind one deepest node (linear).
    strategy: Strategy = "apart"
    # Whether to train a sampler head that also reads the previous token; no engine loads one.
    sampler: bool = False


class Uno(GatedMasks):
    """Gated masks whose inputs are uniformly random tokens, so that the drafter is a plain LoRA
    adapter.
    """

    saved = SavedFiles(shape=("num_masks", "rank", "alpha", "sampler"))
    has_random_tokens = True

    def __init__(self, target: Target, config: UnoConfig) -> None:
        super().__init__(target, config)
