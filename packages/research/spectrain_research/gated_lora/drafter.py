"""Gated-LoRA mask tokens (Samragh et al., 2025, "Your LLM knows the future"): the target predicts
its own next tokens.

Shapes: B batch, K masks, D target width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from spectrain.data.image_processor import refuse_images
from spectrain.drafters.capabilities import Capabilities, SavedFiles
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.models.target import Target
from spectrain_research.shared.gated_masks import MaskConfig
from spectrain_research.shared.learned_masks import LearnedMasks


@dataclass(frozen=True, kw_only=True)
class GatedLoraConfig(MaskConfig):
    """Settings of gated LoRA."""

    # Input of the masks: learned vectors (masks), or the prompt's mean embedding (mean).
    noise: Literal["masks", "mean"] = "masks"


class GatedLora(LearnedMasks):
    """Mask tokens with learned vectors and LoRA at them.

    With rank 0 only the vectors are trained (PaSS, Monea et al., 2023). With noise=mean the input
    is the mean embedding of the prompt, and nothing is trained (Goel et al., 2026, without their
    updates of it in decoding).
    """

    saved = SavedFiles(shape=("num_masks", "rank", "alpha", "sampler", "noise"))
    means: Tensor | None = None  # [B, 1, D] mean embedding of each prompt

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
        if self.has_mean_embedding:
            self.masks = None
        else:
            super().add_inputs(target)

    @property
    def mask_vectors(self) -> Tensor | None:
        return self.means if self.has_mean_embedding else self.masks

    def make_capabilities(self) -> Capabilities:
        capabilities = super().make_capabilities()
        capture = capabilities.capture
        if self.has_mean_embedding and capture is not None:
            capture = replace(capture, state_names=(*capture.state_names, "means"))
        return replace(capabilities, capture=capture)

    def prefill(self, context: Context, tokens: Tensor, lengths: Tensor) -> Features:
        """Run the prompts, whose mean embeddings may be the inputs of the masks after them."""
        if self.has_mean_embedding:
            refuse_images(context.texts, "drafter: this family reads prompts by itself")
            steps = torch.arange(tokens.shape[1], device=tokens.device)
            is_real = (steps < lengths[:, None])[..., None]
            total = (self.head.embed(tokens) * is_real).sum(1, keepdim=True)
            self.means = total / lengths[:, None, None]
        return super().prefill(context, tokens, lengths)
