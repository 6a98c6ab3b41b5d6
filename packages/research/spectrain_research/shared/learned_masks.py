"""Masks in the frozen target whose inputs are learned vectors.

Shapes: B batch, N tokens and masks, E chains, K masks, D target width.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from spectrain.drafters.layers.mask_blocks import init_mask_vectors, replace_embeddings
from spectrain.models.target import Target
from spectrain_research.shared.gated_masks import GatedMasks


class LearnedMasks(GatedMasks):
    """Gated masks with a vector for each mask of all chains in place of an embedding."""

    masks: nn.Parameter | None  # [E K, D]

    def add_inputs(self, target: Target) -> None:
        self.masks = nn.Parameter(torch.zeros(self.masks_per_host, target.width))

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Start the vectors near the mean embedding. LoRA and the sampler start without effect."""
        if self.masks is not None:
            with torch.no_grad():
                self.masks.copy_(init_mask_vectors(self.head.embedding, len(self.masks)))

    @property
    def mask_vectors(self) -> Tensor | None:
        """The embeddings of the masks: [E K, D], or [B, 1, D] of each text; None if no prompt has
        been read that they depend on.
        """
        return self.masks

    def insert_inputs(
        self, target: Target, mask_index: Tensor, rows: Tensor, hosts: Tensor | None
    ) -> AbstractContextManager[None]:
        if self.mask_vectors is None:
            return nullcontext()
        return replace_embeddings(target.head.embedding, self.mask_vectors, mask_index)
