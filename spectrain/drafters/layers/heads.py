"""Modules of drafters with heads on the target's last state.

Shapes: B batch, T tokens, R rows, D target width, K heads or slots, V draft vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.models.weight_block import WeightBlock

from .output_layer import make_output_layer, project_down


class ResBlock(WeightBlock):
    """The residual block x + SiLU(W x + b). W and b are zero at first, so that it starts as the
    identity.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.stored_values = width  # per row: the sum

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHead(nn.Module):
    """The head W2 (SiLU(W1 h) + h). W1 is zero at first, so that it starts as the target's own
    head.
    """

    def __init__(self, width: int, vocab_size: int, num_layers: int, rank: int | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResBlock(width) for _ in range(num_layers))
        self.lm_down, self.lm_head = make_output_layer(width, vocab_size, rank)

    def run_blocks(self, x: Tensor) -> Tensor:
        """Return the state [.., D] after the residual blocks."""
        for block in self.blocks:
            x = block(x)
        return x

    def head_inputs(self, x: Tensor) -> Tensor:
        """Return the inputs of the output layer."""
        return project_down(self.lm_down, self.run_blocks(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.head_inputs(x))
