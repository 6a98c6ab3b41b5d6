"""A head that says how likely a drafted token is kept, for chains that stop before they draw one that is not (SpecDec++).

Shapes: R rows, W width of the drafter's state, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.errors import UserError
from spectrain.kernels.linear_divergence import CHUNK_ROWS, HeadTarget

from .losses import acceptance_rate

REJECTION_WEIGHT = 6.0  # what a rejected token counts beside a kept one: the paper's best


class StopHead(nn.Module):
    """SpecDec++ (Huang et al., 2024), section 3.2: `num_layers` residual blocks h + SiLU(W h) and a linear one.

    The paper judges a token that was drawn; this head speaks before the draw, of alpha = sum_v min(p(v), q(v)), the chance
    that a token drawn from q is kept. So a chain that it ends has drawn nothing that is not verified.
    """

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        if num_layers < 0:
            raise UserError(f"drafter.stop_head={num_layers}: use 0 for a linear head, or the number of its hidden layers")
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.output = nn.Linear(width, 1)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, states: Tensor) -> Tensor:
        """[..] the logit of the chance, of states [.., W]."""
        states = states.to(self.output.weight.dtype)
        for layer in self.layers:
            states = states + F.silu(layer(states))
        return self.output(states)[..., 0]

    def loss(self, states: Tensor, drafter_log_probs: HeadTarget, target_log_probs: HeadTarget) -> Tensor:
        """The summed cross-entropy with alpha of states [R, W], which do not learn from it, REJECTED times where a token is
        rejected: -alpha log c - REJECTED (1 - alpha) log(1 - c)."""
        kept = torch.cat(
            [acceptance_rate(target_log_probs(rows), drafter_log_probs(rows)) for rows in _row_slices(len(states))]
        )
        said = self(states.detach())
        return (-kept * F.logsigmoid(said) - REJECTION_WEIGHT * (1 - kept) * F.logsigmoid(-said)).sum()


def _row_slices(rows: int) -> list[slice]:
    return [slice(first, first + CHUNK_ROWS) for first in range(0, max(rows, 1), CHUNK_ROWS)]
