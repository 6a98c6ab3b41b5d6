"""A drafter's own output layer, of full or of low rank. Shapes: V draft vocabulary, D width, K
rank.

SlimSpec (arXiv 2605.10453): logits = U (P h) with P [K, D] and U [V, K]. This narrows the inputs of
the layer, not its outputs, so every token can still be drafted, with K (V + D) products instead of
V D.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spectrain.errors import UserError
from spectrain.models.weight_block import OutputLayer


def make_output_layer(
    width: int, vocab_size: int, rank: int | None
) -> tuple[nn.Linear | None, OutputLayer]:
    """Make P and U; without a rank, None and the full layer [V, D]."""
    if rank is not None and rank > width:
        raise UserError(
            f"drafter.head_rank={rank}: states are {width} wide; use {width} or less, or leave it "
            "out"
        )
    down = None if rank is None else nn.Linear(width, rank, bias=False)
    return down, OutputLayer(rank or width, vocab_size, bias=False)


@torch.no_grad()
def init_output_layer(down: nn.Linear | None, lm_head: nn.Linear, weight: Tensor) -> None:
    """Copy an output layer [V, D], or its nearest approximation of the given rank (Eckart and
    Young, 1936).

    The approximation is W R^T R, where R [K, D] are the first right singular vectors of W, the
    eigenvectors of W^T W. So P is R and U is W R^T.
    """
    if down is None:
        lm_head.weight.copy_(weight)
        return
    exact = weight.to(device=lm_head.weight.device, dtype=torch.float64)
    vectors = torch.linalg.eigh(exact.T @ exact).eigenvectors  # by ascending eigenvalue
    right = vectors[:, -down.out_features :].T
    down.weight.copy_(right)
    lm_head.weight.copy_(exact @ right.T)


def project_down(down: nn.Linear | None, hidden: Tensor) -> Tensor:
    """Return the inputs of `lm_head`: P h, or h without P."""
    return hidden if down is None else down(hidden)
