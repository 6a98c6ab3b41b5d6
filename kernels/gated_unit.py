"""The gated unit of a feed-forward block, silu(gate) * up, and its gradients, in one launch each.

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


@jit
def _gated_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    gate_ptr,
    up_ptr,
    out_ptr,
    grad_stride,
    gate_stride,
    up_stride,
    num_columns,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of one part of one row; grid [R, parts]. A row of the output has the
    gate's, then those of up.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-gate))
    gate_grad = grad * up * share * (1 + gate * (1 - share))
    kind = out_ptr.dtype.element_ty
    out_ptr += row * 2 * num_columns + column
    tl.store(out_ptr, gate_grad.to(kind), mask=inside)
    tl.store(out_ptr + num_columns, (grad * gate * share).to(kind), mask=inside)


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


@torch.library.custom_op("spectrain::gated_gradient", mutates_args=())
def _launch_gated_gradient(grad: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Return the gradients [R, 2 I] of the gate and of up, side by side as in a merged product."""
    rows, columns = gate.shape
    out = _empty_gradients(grad, gate, up)
    with torch.cuda.device_of(gate):
        _gated_gradient_kernel[(rows, triton.cdiv(columns, BLOCK))](
            grad,
            gate,
            up,
            out,
            grad.stride(0),
            gate.stride(0),
            up.stride(0),
            columns,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out


@_launch_gated_gradient.register_fake
def _empty_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(len(gate), 2 * gate.shape[1])


def _save_unit(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_unit(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    gate_grad, up_grad = _launch_gated_gradient(grad, *ctx.saved_tensors).chunk(2, dim=1)
    return gate_grad, up_grad


_launch_gated_unit.register_autograd(_differentiate_unit, setup_context=_save_unit)


def gated_unit(gate: Tensor, up: Tensor) -> Tensor:
    """Do what `gated_unit_reference` does, in one launch where the kernel runs; its gradients take
    another one."""
    if not runs_on(gate.device):
        return gated_unit_reference(gate, up)
    rows = (x.flatten(0, -2) for x in (gate, up))
    out: Tensor = _launch_gated_unit(*(x if x.stride(-1) == 1 else x.contiguous() for x in rows))
    return out.view(gate.shape)
