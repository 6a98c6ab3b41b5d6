"""Parallel prompt decoding (PPD, Chen et al., 2024, arXiv 2405.18628): learned prompt tokens in
several chains.

Shapes: B batch, E chains, K masks, D target width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from spectrain.config.values import Width
from spectrain.drafters.capabilities import SavedFiles
from spectrain.drafters.layers.gated_masks import GatedMasks, MaskConfig
from spectrain.drafters.layers.masks import init_mask_vectors

if TYPE_CHECKING:
    from spectrain.models.target import Target


@dataclass(frozen=True, kw_only=True)
class PromptTokenConfig(MaskConfig):
    """Settings of prompt tokens."""

    # Number of chains of learned mask vectors whose states are averaged.
    ensembles: Width = 1


class PromptTokens(GatedMasks):
    """`ensembles` chains of prompt tokens after a prefix, which do not see each other, and whose
    states are averaged (section 3.3). With `num_hosts` they follow the nodes where a round is
    likeliest to end, the paper's sparse tree."""

    saved = SavedFiles(shape=("num_masks", "rank", "alpha", "sampler", "ensembles"))

    def __init__(self, target: Target, config: PromptTokenConfig) -> None:
        self.ensembles = config.ensembles
        super().__init__(target, config)

    def add_inputs(self, target: Target) -> None:
        self.masks = nn.Parameter(torch.zeros(self.masks_per_host, target.width))

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Start the vectors near the mean embedding."""
        assert self.masks is not None
        with torch.no_grad():
            self.masks.copy_(init_mask_vectors(self.head.embedding, self.masks_per_host))
