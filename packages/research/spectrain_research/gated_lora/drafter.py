"""Gated-LoRA mask tokens (Samragh et al., 2025, "Your LLM knows the future"): the target predicts
its own next tokens.

Shapes: B batch, K masks, D target width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from spectrain.drafters.capabilities import SavedFiles
from spectrain.drafters.layers.gated_masks import GatedMasks, MaskConfig
from spectrain.drafters.layers.masks import init_mask_vectors
from spectrain.errors import UserError

if TYPE_CHECKING:
    from spectrain.models.target import Target


@dataclass(frozen=True, kw_only=True)
class GatedLoraConfig(MaskConfig):
    """Settings of gated LoRA."""

    # Input of the masks: learned vectors (masks), or the prompt's mean embedding (mean).
    noise: Literal["masks", "mean"] = "masks"


class GatedLora(GatedMasks):
    """Mask tokens with learned vectors and LoRA at them.

    With rank 0 only the vectors are trained (PaSS, Monea et al., 2023). With noise=mean the input
    is the mean embedding of the prompt, and nothing is trained (Goel et al., 2026, without their
    updates of it in decoding).
    """

    saved = SavedFiles(shape=("num_masks", "rank", "alpha", "sampler", "noise"))

    def __init__(self, target: Target, config: GatedLoraConfig) -> None:
        if config.noise == "mean" and (config.rank or config.sampler):
            raise UserError(
                "drafter.noise=mean: nothing is trained with it; use drafter.rank=0 "
                "drafter.sampler=false"
            )
        self.has_mean_embedding = config.noise == "mean"
        super().__init__(target, config)

    def add_inputs(self, target: Target) -> None:
        """Add the vectors, unless the input is the mean embedding."""
        if not self.has_mean_embedding:
            self.masks = nn.Parameter(torch.zeros(self.masks_per_host, target.width))

    @property
    def mask_vectors(self) -> Tensor | None:
        return self.means if self.has_mean_embedding else self.masks

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Start the masks near the mean embedding. LoRA and the sampler start without effect."""
        if self.masks is not None:
            with torch.no_grad():
                self.masks.copy_(init_mask_vectors(self.head.embedding, self.masks_per_host))
