"""The expected accepted length of chains as a loss, whose gradient weights of single drafts give
exactly.

Shapes: A chains, K drafts of a chain, R judged drafts, V draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectrain.drafters.layers.losses import acceptance_rate, forward_kl


def expected_length(rates: Tensor) -> Tensor:
    """Return the expected accepted drafts [A] of chains with acceptance rates [A, K], each given
    that all drafts before it are accepted: sum_j a_1 .. a_j.
    """
    return rates.cumprod(1).sum(1)


def length_gradient(rates: Tensor) -> Tensor:
    """Return the derivatives [A, K] of the expected length by each rate: a_1 .. a_(k-1) times 1 +
    a_(k+1) + a_(k+1) a_(k+2) + .., without a division.
    """
    ones = torch.ones_like(rates[:, :1])
    before = torch.cat([ones, rates[:, :-1]], dim=1).cumprod(1)
    after = [ones[:, 0]]
    for rate in rates[:, 1:].flip(1).unbind(1):
        after.append(1 + rate * after[-1])
    return before * torch.stack(after[::-1], dim=1)


class RecordedRates:
    """A divergence that records the acceptance rates of chunks of rows."""

    def __init__(self) -> None:
        self.chunks: list[Tensor] = []  # [r] each, in order

    def __call__(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        rates = acceptance_rate(log_p, log_q)
        self.chunks.append(rates.detach())
        return 1 - rates


def weighted_loss(log_p: Tensor, log_q: Tensor, length_weight: Tensor, kl_weight: Tensor) -> Tensor:
    """Return length_weight (1 - sum_v min(p, q)) + kl_weight KL(p || q) of rows [r]."""
    distance = 1 - acceptance_rate(log_p, log_q)
    return length_weight * distance + kl_weight * forward_kl(log_p, log_q)
