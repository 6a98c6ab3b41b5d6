"""Positions that rotate nothing. Shapes: B batch, T tokens, D head size."""

from __future__ import annotations

import torch
from torch import Tensor


class NoRotation:
    """A rotary embedding that leaves queries and keys as they are, at every position."""

    def __init__(self, head_size: int) -> None:
        self.head_size = head_size

    def __call__(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines 1 and sines 0 [B, T, D] in the type of `x`."""
        shape = (*positions.shape, self.head_size)
        ones = torch.ones(shape, dtype=x.dtype, device=x.device)
        return ones, torch.zeros_like(ones)
