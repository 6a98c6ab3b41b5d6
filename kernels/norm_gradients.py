"""The RMS norm of a training, with its gradients: one launch each way; and of texts that a target
reads without gradients.

Shapes: R rows, D width, P programs of the backward pass. The reference in torch comes first. A
program of the forward pass owns a row; one of the backward pass owns every P-th row, because it
sums the gradient of the weight over its rows. The number of programs is fixed, so that the sums are
the same on every GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatch import jit, takes_gradients, tl, triton
from .rms_norm import count_row_warps, norm_row, rms_norm_reference

MAX_WIDTH = 8192
"""The widest rows that the backward pass holds in registers."""
PROGRAMS = 264
"""Programs of the backward pass: two for each of an H200's multiprocessors."""


def join_norms_reference(
    parts: list[Tensor], weights: list[Tensor], eps: list[float], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the RMS norms of n tensors [.., D] times their weights [D] side by side, [.., n D], in
    a type, and the last tensor as it is.
    """
    normed = [rms_norm_reference(*operands).to(dtype) for operands in zip(parts, weights, eps)]
    return torch.cat(normed, dim=-1), parts[-1]


@jit
def _norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, normed_ptr, normed_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Norm one row; grid [R]."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    inside = dims < WIDTH
    x = tl.load(x_ptr + row * WIDTH + dims, mask=inside, other=0.0).to(tl.float32)
    normed = norm_row(x, weight_ptr, eps, WIDTH, BLOCK).to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + row * normed_stride + dims, normed, mask=inside)


@jit
def _norm_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    stream_grad_ptr,
    x_ptr,
    weight_ptr,
    x_grad_ptr,
    sums_ptr,
    grad_stride,
    num_rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of every P-th row, and the sum of their weight's; grid [P]."""
    program = tl.program_id(0)
    dims = tl.arange(0, BLOCK)
    inside = dims < WIDTH
    weight = tl.load(weight_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    row = program.to(tl.int64)
    for _ in range(program, num_rows, tl.num_programs(0)):
        x = tl.load(x_ptr + row * WIDTH + dims, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * grad_stride + dims, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
        x *= scale
        sums += grad * x
        if x_grad_ptr is not None:
            grad *= weight
            x_grad = (grad - x * (tl.sum(grad * x, 0) / WIDTH)) * scale
            if stream_grad_ptr is not None:
                stream = tl.load(stream_grad_ptr + row * WIDTH + dims, mask=inside, other=0.0)
                x_grad += stream.to(tl.float32)
            x_grad = x_grad.to(x_grad_ptr.dtype.element_ty)
            tl.store(x_grad_ptr + row * WIDTH + dims, x_grad, mask=inside)
        row += tl.num_programs(0)
    tl.store(sums_ptr + program.to(tl.int64) * WIDTH + dims, sums, mask=inside)


@torch.library.custom_op("spectrain::norm", mutates_args={"normed"})
def _launch_norm(x: Tensor, weight: Tensor, normed: Tensor, eps: float) -> None:
    """Norm rows x [R, D] into the rows of `normed` [R, D], which may be parts of longer ones."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    if not rows:
        return
    with torch.cuda.device_of(x):
        _norm_kernel[(rows,)](
            x,
            weight,
            normed,
            normed.stride(0),
            eps,
            WIDTH=width,
            BLOCK=block,
            num_warps=count_row_warps(block),
        )


@_launch_norm.register_fake
def _(x: Tensor, weight: Tensor, normed: Tensor, eps: float) -> None: ...


@torch.library.custom_op("spectrain::norm_gradient", mutates_args={"x_grad"})
def _launch_norm_gradient(
    grad: Tensor,
    stream_grad: Tensor | None,
    x: Tensor,
    weight: Tensor,
    x_grad: Tensor | None,
    eps: float,
) -> Tensor:
    """Write the gradient of rows x [R, D] to `x_grad`; return sums [P, D] of the weight's."""
    rows, width = x.shape
    sums = _empty_sums(grad, stream_grad, x)
    block = triton.next_power_of_2(width)
    if not rows:
        return sums
    with torch.cuda.device_of(x):
        _norm_gradient_kernel[(len(sums),)](
            grad,
            stream_grad,
            x,
            weight,
            x_grad,
            sums,
            grad.stride(0),
            rows,
            eps,
            WIDTH=width,
            BLOCK=block,
            num_warps=count_row_warps(block),
        )
    return sums


@_launch_norm_gradient.register_fake
def _empty_sums(grad: Tensor, stream_grad: Tensor | None, x: Tensor, *args: Any) -> Tensor:
    return x.new_empty(min(PROGRAMS, len(x)), x.shape[1], dtype=torch.float32)


class _JoinedNorms(torch.autograd.Function):
    """Norms several tensors of the same shape, side by side in one result."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, eps: tuple[float, ...], *parts: Tensor
    ) -> tuple[Tensor, Tensor]:
        count = len(eps)
        last = parts[count - 1]
        rows = [part.flatten(0, -2).contiguous() for part in parts[:count]]
        width = rows[0].shape[1]
        normed = rows[0].new_empty(len(rows[0]), count * width, dtype=dtype)
        for number, (x, weight) in enumerate(zip(rows, parts[count:])):
            _launch_norm(x, weight, normed[:, number * width :][:, :width], eps[number])
        ctx.eps = eps
        ctx.save_for_backward(*rows, *parts[count:])
        ctx.shape = last.shape
        return normed.view(*last.shape[:-1], count * width), last

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, stream_grad: Tensor | None) -> Any:
        count = len(ctx.eps)
        tensors = ctx.saved_tensors
        if grad is None:
            empty = [None] * (count - 1)
            return None, None, *empty, stream_grad, *empty, None
        rows = grad.flatten(0, -2)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        grads: list[Tensor | None] = []
        weight_grads: list[Tensor] = []
        for number, (x, weight) in enumerate(zip(tensors[:count], tensors[count:])):
            part = rows[:, number * x.shape[1] :][:, : x.shape[1]]
            x_grad = torch.empty_like(x) if ctx.needs_input_grad[2 + number] else None
            stream = None
            if number == count - 1 and stream_grad is not None and x_grad is not None:
                stream = stream_grad.reshape(x.shape).contiguous()
            sums = _launch_norm_gradient(part, stream, x, weight, x_grad, ctx.eps[number])
            grads.append(None if x_grad is None else x_grad.view(ctx.shape))
            weight_grads.append(sums.sum(0).to(weight.dtype))
        return None, None, *grads, *weight_grads


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of rows [.., D] times the weight [D], without gradients."""
    rows = x.flatten(0, -2).contiguous()
    normed = torch.empty_like(rows)
    _launch_norm(rows, weight, normed, eps)
    return normed.view(x.shape)


def can_norm(width: int) -> bool:
    """Tell whether the kernels take rows of a width."""
    return width <= MAX_WIDTH


def join_norms(
    parts: list[Tensor], weights: list[Tensor], eps: list[float], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Do what `join_norms_reference` does, in one launch for each tensor where the kernel runs.
    What else reads the last tensor must read this result, so that one launch adds up its gradients.
    """
    if not takes_gradients(parts[-1]):
        return join_norms_reference(parts, weights, eps, dtype)
    joined: tuple[Tensor, Tensor] = _JoinedNorms.apply(dtype, tuple(eps), *parts, *weights)
    return joined
