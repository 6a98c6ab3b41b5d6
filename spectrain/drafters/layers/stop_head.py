"""A head that predicts the acceptance of a draft, so that chains stop before a token is rejected
(SpecDec++).

Shapes: R rows, W width of the drafter's state, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.errors import UserError
from spectrain.kernels.linear_divergence import CHUNK_ROWS, HeadTarget

from .losses import acceptance_rate

# loss weight of a rejected token relative to an accepted one: the paper's best
REJECTION_WEIGHT = 6.0


class StopHead(nn.Module):
    """SpecDec++'s head (Huang et al., 2024, section 3.2): `num_layers` residual blocks h + SiLU(W
    h) and a linear layer.

    The paper predicts the acceptance of a drawn token. This head predicts alpha = sum_v min(p(v),
    q(v)), the probability that a token drawn from q is accepted, before the draw. So every token
    that a stopped chain has drawn is verified.
    """

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        if num_layers < 0:
            raise UserError(
                f"drafter.stop_head={num_layers}: use 0 for a linear head, or the number of its "
                "hidden layers"
            )
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.output = nn.Linear(width, 1)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Return the logit [..] of the acceptance probability of states [.., W]."""
        states = states.to(self.output.weight.dtype)
        for layer in self.layers:
            states = states + F.silu(layer(states))
        return self.output(states)[..., 0]

    def loss(
        self, states: Tensor, drafter_log_probs: HeadTarget, target_log_probs: HeadTarget
    ) -> Tensor:
        """Return the summed loss -alpha log c - REJECTION_WEIGHT (1 - alpha) log(1 - c) of states
        [R, W], which get no gradient."""
        alpha = torch.cat(
            [
                acceptance_rate(target_log_probs(rows), drafter_log_probs(rows))
                for rows in _row_slices(len(states))
            ]
        )
        logits = self(states.detach())
        return (
            -alpha * F.logsigmoid(logits) - REJECTION_WEIGHT * (1 - alpha) * F.logsigmoid(-logits)
        ).sum()


def _row_slices(rows: int) -> list[slice]:
    return [slice(first, first + CHUNK_ROWS) for first in range(0, max(rows, 1), CHUNK_ROWS)]
