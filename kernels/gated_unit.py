"""The gated unit of a feed-forward block, silu(gate) * up, in one launch.

Shapes: R rows, I inner width. The reference in torch comes first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import jit, runs_on, tl, triton

BLOCK = 1024
"""Numbers of a program: eight for each thread of four warps."""


def gated_unit_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up [.., I], computed in float32."""
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


@jit
def _gated_unit_kernel(  # type: ignore[no-untyped-def]
    gate_ptr,
    up_ptr,
    out_ptr,
    gate_stride,
    up_stride,
    num_columns,
    BLOCK: tl.constexpr,
):
    """Compute one part of one row; grid [R, parts]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * num_columns + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@torch.library.custom_op("spectrain::gated_unit", mutates_args=())
def _launch_gated_unit(gate: Tensor, up: Tensor) -> Tensor:
    """Launch the kernel for rows [R, I], which may be parts of longer ones."""
    rows, columns = gate.shape
    out = _empty_unit(gate, up)
    with torch.cuda.device_of(gate):
        _gated_unit_kernel[(rows, triton.cdiv(columns, BLOCK))](
            gate, up, out, gate.stride(0), up.stride(0), columns, BLOCK=BLOCK, num_warps=4
        )
    return out


@_launch_gated_unit.register_fake
def _empty_unit(gate: Tensor, *args: Any) -> Tensor:
    return gate.new_empty(gate.shape)


def gated_unit(gate: Tensor, up: Tensor) -> Tensor:
    """Do what `gated_unit_reference` does, in one launch where the kernel runs."""
    if not runs_on(gate.device):
        return gated_unit_reference(gate, up)
    rows = (x.flatten(0, -2) for x in (gate, up))
    out: Tensor = _launch_gated_unit(*(x if x.stride(-1) == 1 else x.contiguous() for x in rows))
    return out.view(gate.shape)
