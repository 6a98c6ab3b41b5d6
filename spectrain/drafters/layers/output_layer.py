"""A drafter's own output layer, of full or of low rank. Shapes: V draft vocabulary, D width, K rank.

SlimSpec (arXiv 2605.10453): logits = U (P h) with P [K, D] and U [V, K]. What the layer reads is made narrow, not what it says,
so every token can still be drafted, at K (V + D) products instead of V D.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spectrain.errors import UserError


def make_output_layer(width: int, vocab_size: int, rank: int | None) -> tuple[nn.Linear | None, nn.Linear]:
    """P, None where the rank is full, and U, or the plain layer [V, D]."""
    if rank is not None and rank > width:
        raise UserError(f"drafter.head_rank={rank}: states are {width} wide; use {width} or less, or leave it out")
    down = None if rank is None else nn.Linear(width, rank, bias=False)
    return down, nn.Linear(rank or width, vocab_size, bias=False)


@torch.no_grad()
def init_output_layer(down: nn.Linear | None, lm_head: nn.Linear, weight: Tensor) -> None:
    """Copy an output layer [V, D], or what of it has the asked rank and is nearest to it (Eckart and Young, 1936).

    That is W R^T R with R [K, D] the first right singular vectors of W, the eigenvectors of W^T W: P is R, and U is W R^T.
    """
    if down is None:
        lm_head.weight.copy_(weight)
        return
    exact = weight.to(device=lm_head.weight.device, dtype=torch.float64)
    vectors = torch.linalg.eigh(exact.T @ exact).eigenvectors  # by rising eigenvalue
    right = vectors[:, -down.out_features :].T
    down.weight.copy_(right)
    lm_head.weight.copy_(exact @ right.T)


def project_down(down: nn.Linear | None, hidden: Tensor) -> Tensor:
    """What `lm_head` reads, P h."""
    return hidden if down is None else down(hidden)
