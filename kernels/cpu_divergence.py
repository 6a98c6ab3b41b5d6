"""The interface to the compiled kernels of a loss over the vocabulary on a CPU (`cpu_losses`).
Shapes: r rows, V vocabulary.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .cpu_kernels import has_cpu_kernels
from .row_kl import TargetLogits

MAX_THREADS = 4
"""Threads up to which the kernels, which run on one, are faster than torch on all."""


@cache
def _load_losses() -> Any:
    """Import the compiled kernels, where `has_cpu_kernels` is true."""
    from . import cpu_losses

    return cpu_losses


def has_loss_kernels(products: Tensor, softcap: float | None = None) -> bool:
    """Return whether the kernels take these products [r, V] and logits that are capped so."""
    if (
        softcap is not None
        or products.dtype != torch.bfloat16
        or torch.get_num_threads() > MAX_THREADS
    ):
        return False
    return has_cpu_kernels(products.dtype, products.device)


def compare_logits(
    product: Tensor, target: TargetLogits, row_weight: Tensor, scale: float, with_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `row_kl_reference` of bfloat16 products [r, V], which are contiguous, with the
    logits of a target.
    """
    rows, vocab = product.shape
    target_products = target.products.to(product.dtype).contiguous()
    weight = row_weight.float().contiguous()
    log_z = None if target.log_z is None else target.log_z.float().contiguous()
    losses = weight.new_empty(rows)
    scratch = weight.new_empty(2 * vocab)
    best, labels = (torch.empty(rows, dtype=torch.int64) for _ in range(2))
    _load_losses().row_kl(
        product.data_ptr(),
        target_products.data_ptr(),
        0 if log_z is None else log_z.data_ptr(),
        weight.data_ptr(),
        losses.data_ptr(),
        best.data_ptr(),
        labels.data_ptr(),
        rows,
        vocab,
        scale,
        target.scale,
        with_grad,
        scratch.data_ptr(),
    )
    return losses, best, labels


def argmax_logits(target: TargetLogits, with_log_z: bool) -> tuple[Tensor, Tensor]:
    """Return the most likely entries [r] of bfloat16 logits, and their log-sum-exps where these
    are requested.
    """
    products = target.products.contiguous()
    rows, vocab = products.shape
    best = torch.empty(rows, dtype=torch.int64)
    log_z = torch.empty(rows)
    scratch = torch.empty(vocab)
    _load_losses().row_argmax(
        products.data_ptr(),
        best.data_ptr(),
        log_z.data_ptr() if with_log_z else 0,
        rows,
        vocab,
        target.scale,
        scratch.data_ptr(),
    )
    return best, log_z
