"""Modules of drafters with heads on the target's last state.

Shapes: B batch, T tokens, R rows, D target width, K heads or slots, V draft vocabulary.
"""

from __future__ import annotations

import torch
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


class Sampler(nn.Module):
    """Corrects a mask's state for the token before it by two layers in a residual branch, which is
    zero at first.

    The authors let the two layers, each with a norm, replace the state, which they must then first
    learn to pass on.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(2 * width, width)
        self.first_norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, width)
        nn.init.zeros_(self.second.weight)
        nn.init.zeros_(self.second.bias)

    def forward(self, state: Tensor, previous: Tensor) -> Tensor:
        """Return the inputs [.., D] of the target's head from states and embeddings of the
        previous tokens [.., D].
        """
        # An embedding is about 20 times smaller than a normed state.
        previous = F.rms_norm(previous, previous.shape[-1:])
        x = torch.cat([state, previous], dim=-1).to(self.first.weight.dtype)
        return state + self.second(self.first_norm(F.silu(self.first(x))))
