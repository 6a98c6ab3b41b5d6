"""Dovetail's dynamic gating fusion (Zhang et al., 2024, arXiv 2412.18934, section 3.3). Shapes:
B batch, T tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spectrain.config.values import Steps
from spectrain.drafters.eagle1 import Eagle1
from spectrain.drafters.layers.losses import LossName
from spectrain.models.target import Target


class GatedFusion(nn.Module):
    """x = g f + (1 - g) W_e e with g = sigmoid(W_g [e; f] + b), from embeddings e and features f,
    [.., D] each.

    At first g is near 1, so that the feature passes.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(2 * width, width)
        self.project = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.gate.weight)
        nn.init.constant_(self.gate.bias, 2.0)

    @property
    def weight(self) -> Tensor:
        """The weight of the gate, whose type is that of all."""
        return self.gate.weight

    def forward(self, pairs: Tensor) -> Tensor:
        """Fuse [e; f] [.., 2 D] to [.., D]."""
        embedded, features = pairs.chunk(2, dim=-1)
        gate = torch.sigmoid(self.gate(pairs))
        return gate * features + (1 - gate) * self.project(embedded)


class Dovetail(Eagle1):
    """EAGLE's layer whose input is fused by a gate instead of a linear layer.

    With drafter=other_device it drafts on a GPU for a target on the CPU, as the authors do.
    """

    def __init__(
        self,
        target: Target,
        # Number of draft steps that are unrolled in training.
        num_steps: Steps = 1,
        # Divergence between the token distributions that the target's head computes from the two
        # features.
        loss: LossName = "forward_kl",
        # Configuration keys of the layer that differ from the target's; null copies the target's.
        architecture: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            target, num_steps=num_steps, loss=loss, start="random", architecture=architecture
        )
        self.fc = GatedFusion(target.width)  # type: ignore[assignment]
