"""A residual sum and the norm that reads it, in one launch.

Shapes: B batch, F rows, C rows for the root and all nodes of a round, D width. The references in
torch come first. In the kernel a program owns a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatch import jit, runs_on, tl, triton
from .rms_norm import count_row_warps, norm_row, rms_norm_reference


def add_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return x + residual [B, F, D], and its RMS norm."""
    total = x + residual
    return total, rms_norm_reference(total, weight, eps)


def store_states_reference(
    states: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    first: int,
    counts: Tensor | None,
    stores_normed: bool,
) -> Tensor:
    """Store x + residual [B, F, D], or its norm, in the rows of `states` [B, C, D] from `first` on,
    and return the norm. With `counts` [B] only row counts - 1 of each text is summed, stored and
    returned.
    """
    if counts is not None:
        index = (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, x.shape[-1])
        x, residual = x.gather(1, index), residual.gather(1, index)
    total, normed = add_norm_reference(x, residual, weight, eps)
    states[:, first : first + x.shape[1]] = normed if stores_normed else total
    return normed


@jit
def _add_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    counts_ptr,
    total_ptr,
    normed_ptr,
    total_stride_b,
    num_inputs,
    eps,
    STORES_NORMED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add and norm one row; grid [F, B]. With counts it is the last real one of the text."""
    node = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    inside = dims < WIDTH
    source = batch * num_inputs + node
    if counts_ptr is not None:
        source = batch * num_inputs + tl.maximum(tl.load(counts_ptr + batch) - 1, 0)
    x = tl.load(x_ptr + source * WIDTH + dims, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(residual_ptr + source * WIDTH + dims, mask=inside, other=0.0).to(tl.float32)
    # The sum is rounded as it is stored, before the norm reads it.
    total = (x + other).to(normed_ptr.dtype.element_ty)
    normed = norm_row(total.to(tl.float32), weight_ptr, eps, WIDTH, BLOCK)
    normed = normed.to(normed_ptr.dtype.element_ty)
    stored = normed if STORES_NORMED else total
    tl.store(total_ptr + batch * total_stride_b + node * WIDTH + dims, stored, mask=inside)
    row = batch * tl.num_programs(0) + node
    tl.store(normed_ptr + row * WIDTH + dims, normed, mask=inside)


def _run_kernel(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    total: Tensor,
    normed: Tensor,
    counts: Tensor | None,
    stores_normed: bool,
) -> None:
    """Launch the kernel for rows [B, F, D] of `total` and `normed`."""
    batch, count, width = normed.shape
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):
        _add_norm_kernel[(count, batch)](
            x,
            residual,
            weight,
            counts,
            total,
            normed,
            total.stride(0),
            x.shape[1],
            eps,
            STORES_NORMED=stores_normed,
            WIDTH=width,
            BLOCK=block,
            num_warps=count_row_warps(block),
        )


@torch.library.custom_op("spectrain::add_norm", mutates_args=())
def _launch_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total, normed = torch.empty_like(x), torch.empty_like(x)
    _run_kernel(x, residual, weight, eps, total, normed, None, False)
    return total, normed


@_launch_add_norm.register_fake
def _(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("spectrain::store_states", mutates_args={"states"})
def _launch_store(
    states: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    first: int,
    counts: Tensor | None,
    stores_normed: bool,
) -> Tensor:
    normed = _empty_normed(states, x, residual, weight, eps, first, counts)
    rows = states[:, first : first + normed.shape[1]]
    _run_kernel(x, residual, weight, eps, rows, normed, counts, stores_normed)
    return normed


@_launch_store.register_fake
def _empty_normed(
    states: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    first: int,
    counts: Tensor | None,
    *args: Any,
) -> Tensor:
    return x.new_empty(len(x), x.shape[1] if counts is None else 1, x.shape[2])


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Do what `add_norm_reference` does, in one launch where the kernel runs."""
    if not runs_on(x.device):
        return add_norm_reference(x, residual, weight, eps)
    outputs: tuple[Tensor, Tensor] = _launch_add_norm(
        x.contiguous(), residual.contiguous(), weight, eps
    )
    return outputs


def store_states(
    states: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    first: int,
    counts: Tensor | None = None,
    stores_normed: bool = False,
) -> Tensor:
    """Do what `store_states_reference` does, in one launch where the kernel runs."""
    arguments = weight, eps, first, counts, stores_normed
    if not runs_on(x.device):
        return store_states_reference(states, x, residual, *arguments)
    normed: Tensor = _launch_store(states, x.contiguous(), residual.contiguous(), *arguments)
    return normed
