"""Whether oneDNN multiplies bfloat16 fast here, and whether a row has the same bits whatever the
other rows are.

A tree node gets the bits of a single token where products of a row do not depend on the number of
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.kernels.onednn import onednn_linear
from spectrain.models.architectures.quantized import has_dense_weight
from spectrain.models.forward_override import Forward
from spectrain.models.weight_block import BlockLinear

CONSISTENT_ROWS = 32
"""Rows of bfloat16, from two on, up to which oneDNN gives a row the same bits whatever the other
rows are.
"""

batch_invariant = ContextVar("batch_invariant", default=False)
"""Whether products of a row must not depend on the number of rows, because tree nodes are
multiplied.
"""


@contextmanager
def enforce_batch_invariance() -> Iterator[None]:
    """Make the products of a row independent of the number of rows while the context is open: a
    tree node gets the bits of a single token."""
    before = batch_invariant.set(True)
    try:
        yield
    finally:
        batch_invariant.reset(before)


@cache
def packable_dtypes() -> tuple[torch.dtype, ...]:
    """Return the types that oneDNN multiplies fast here; bfloat16 only where the processor
    supports it.
    """
    if not torch.backends.mkldnn.is_available():
        return ()
    return (
        (torch.float32, torch.bfloat16)
        if torch.ops.mkldnn._is_mkldnn_bf16_supported()
        else (torch.float32,)
    )


@cache
def has_bfloat16() -> bool:
    """Return whether the processor itself multiplies bfloat16, which takes at most half the time
    of float32.
    """
    return torch.bfloat16 in packable_dtypes() and (
        torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    )


@cache
def has_batch_invariance() -> bool:
    """Return whether bfloat16 products give a row the same bits in batches of 2 to
    CONSISTENT_ROWS rows.
    """
    return has_bfloat16() and all(
        is_batch_invariant(width, count)
        for width in (96, 576, 1536, 4864)
        for count in (2, 3, 5, 8, 17)
    )


@cache
def is_batch_invariant(width: int, count: int) -> bool:
    """Return whether oneDNN sums `count` rows of bfloat16 in the same order as CONSISTENT_ROWS
    rows. The test uses sums that cancel, so that only rounding errors remain."""
    # A plan asks while torch's default device is "meta", where nothing is multiplied.
    with torch.no_grad(), torch.device("cpu"):
        source = torch.Generator().manual_seed(0)
        half = (width + 1) // 2
        order = torch.randperm(width, generator=source)
        signs = torch.cat([torch.ones(half), -torch.ones(half)])
        weight, rows = (
            torch.randn(number, half, generator=source).repeat(1, 2)
            for number in (64, CONSISTENT_ROWS)
        )
        weight = weight[:, order].bfloat16()
        rows = (rows * signs)[:, order].bfloat16()
        weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        return torch.equal(onednn_linear(rows, weight)[:count], onednn_linear(rows[:count], weight))


def multiply_paired(input: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the product of a bfloat16 input [.., D]. A single row is multiplied as a pair of
    copies where oneDNN sums it in another order, as it does above 1,024 numbers without AMX."""
    if input.numel() != input.shape[-1] or is_batch_invariant(input.shape[-1], 1):
        return multiply(input)
    return multiply(input.reshape(1, -1).repeat(2, 1))[:1].view(*input.shape[:-1], -1)


def paired_forwards(module: nn.Module) -> Iterator[tuple[nn.Module, Forward]]:
    """Yield the plain linears that sum a single row of bfloat16 in another order, with forwards
    that multiply pairs.
    """
    if torch.bfloat16 not in packable_dtypes():
        return
    for linear in module.modules():
        if (
            (type(linear) is nn.Linear or isinstance(linear, BlockLinear))
            and has_dense_weight(linear)
            and not is_batch_invariant(linear.in_features, 1)
        ):
            yield linear, partial(_paired_product, linear)


def _paired_product(linear: nn.Linear, input: Tensor) -> Tensor:
    return multiply_paired(input, lambda rows: F.linear(rows, linear.weight, linear.bias))
