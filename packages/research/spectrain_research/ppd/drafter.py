"""Parallel prompt decoding (PPD, Chen et al., 2024, arXiv 2405.18628): learned prompt tokens in
several chains.

Shapes: B batch, E chains, K masks, D target width.
"""

from __future__ import annotations

from dataclasses import dataclass

from spectrain.config.values import Width
from spectrain.drafters.capabilities import SavedFiles
from spectrain.drafters.layers.gated_masks import MaskConfig
from spectrain.models.target import Target
from spectrain_research.shared.learned_masks import LearnedMasks


@dataclass(frozen=True, kw_only=True)
class PromptTokenConfig(MaskConfig):
    """Settings of prompt tokens."""

    # Number of chains of learned mask vectors whose states are averaged.
    ensembles: Width = 1


class PromptTokens(LearnedMasks):
    """`ensembles` chains of prompt tokens after a prefix, which do not see each other, and whose
    states are averaged (section 3.3). With `num_hosts` they follow the nodes where a round is
    likeliest to end, the paper's sparse tree."""

    saved = SavedFiles(shape=("num_masks", "rank", "alpha", "sampler", "ensembles"))

    def __init__(self, target: Target, config: PromptTokenConfig) -> None:
        self.ensembles = config.ensembles
        super().__init__(target, config)
