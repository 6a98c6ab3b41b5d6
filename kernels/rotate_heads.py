"""Rotate the queries and keys of a training by their positions, and back: one launch each way.

Shapes: B batch, T tokens, H query heads, K key-value heads, D head size. The reference in torch
comes first. A program owns a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatch import jit, takes_gradients, tl, triton

MAX_VALUES = 8192
"""The most values of a token's queries that a program holds in registers."""


def rotate_heads_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries [B, H, T, D] and keys [B, K, T, D], and values [B, K, T, D], of
    products q [B, T, H D], k and v [B, T, K D]. Cosines and sines [B, T, D] have equal halves.
    """
    size = cos.shape[-1]
    queries, keys, values = (x.unflatten(-1, (-1, size)).transpose(1, 2) for x in (q, k, v))

    def rotate(x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        first, second = x.to(wide).chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return (x.to(wide) * cos[:, None].to(wide) + turned * sin[:, None].to(wide)).to(x.dtype)

    return rotate(queries), rotate(keys), values


@jit
def _turn_heads(  # type: ignore[no-untyped-def]
    x_ptr,
    stride_h,
    out_ptr,
    cos,
    sin,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the rotated heads of one token."""
    head = tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < HEADS) & (dim < SIZE // 2)
    x_ptr += head.to(tl.int64) * stride_h + dim
    out_ptr += head * SIZE + dim
    first = tl.load(x_ptr, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + SIZE // 2, mask=inside, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(out_ptr + SIZE // 2, (second * cos + first * sin).to(kind), mask=inside)


@jit
def _rotate_heads_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    v_out_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    k_stride_b,
    k_stride_h,
    k_stride_t,
    v_stride_b,
    v_stride_h,
    v_stride_t,
    angle_stride_b,
    q_out_stride,
    k_out_stride,
    v_out_stride,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rotate the heads of one token, and with v_ptr copy its values; grid [T, B]."""
    token = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    row = batch * tl.num_programs(0) + token
    dim = tl.arange(0, BLOCK_D)
    angle = batch * angle_stride_b + token * SIZE + dim
    cos = tl.load(cos_ptr + angle, mask=dim < SIZE // 2, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle, mask=dim < SIZE // 2, other=0.0).to(tl.float32)[None, :]
    if BACK:
        sin = -sin
    q_ptr += batch * q_stride_b + token * q_stride_t
    k_ptr += batch * k_stride_b + token * k_stride_t
    q_out_ptr += row * q_out_stride
    k_out_ptr += row * k_out_stride
    _turn_heads(q_ptr, q_stride_h, q_out_ptr, cos, sin, HEADS, SIZE, BLOCK_H, BLOCK_D)
    _turn_heads(k_ptr, k_stride_h, k_out_ptr, cos, sin, KV_HEADS, SIZE, BLOCK_K, BLOCK_D)
    if v_ptr is not None:
        head = tl.arange(0, BLOCK_K)[:, None]
        column = tl.arange(0, 2 * BLOCK_D)[None, :]
        inside = (head < KV_HEADS) & (column < SIZE)
        v_ptr += batch * v_stride_b + token * v_stride_t
        values = tl.load(v_ptr + head.to(tl.int64) * v_stride_h + column, mask=inside)
        tl.store(v_out_ptr + row * v_out_stride + head * SIZE + column, values, mask=inside)


@torch.library.custom_op("spectrain::rotate_heads", mutates_args={"q_out", "k_out", "v_out"})
def _launch_rotate_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    v_out: Tensor | None,
    back: bool,
) -> None:
    """Rotate q [B, H, T, D] and k [B, K, T, D], or rotate back and copy v; the outputs have rows
    [B T, H D], [B T, K D], which may be parts of longer ones.
    """
    batch, heads, length, size = q.shape
    kv_heads = k.shape[1]
    values = k if v is None else v
    with torch.cuda.device_of(q):
        _rotate_heads_kernel[(length, batch)](
            q,
            k,
            v,
            cos,
            sin,
            q_out,
            k_out,
            v_out,
            *q.stride()[:3],
            *k.stride()[:3],
            *values.stride()[:3],
            cos.stride(0),
            q_out.stride(0),
            k_out.stride(0),
            0 if v_out is None else v_out.stride(0),
            BACK=back,
            HEADS=heads,
            KV_HEADS=kv_heads,
            SIZE=size,
            BLOCK_H=triton.next_power_of_2(heads),
            BLOCK_K=triton.next_power_of_2(kv_heads),
            BLOCK_D=triton.next_power_of_2(size // 2),
            num_warps=4,
        )


@_launch_rotate_heads.register_fake
def _(*args: Any) -> None: ...


class _RotatedHeads(torch.autograd.Function):
    """Rotates queries and keys; the gradients of queries, keys and values lie side by side, as the
    outputs of one product do.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = (x.contiguous().expand(len(q), -1, -1) for x in (cos, sin))
        queries, keys, values = (_split_heads(x, cos.shape[-1]) for x in (q, k, v))
        ctx.save_for_backward(cos, sin)
        return *rotate_split_heads(queries, keys, cos, sin), values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        batch, _, length, size = grads[0].shape
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in grads)
        widths = [x.shape[1] * size for x in grads]
        product = grads[0].new_empty(batch * length, sum(widths))
        parts = product.split(widths, dim=1)
        _launch_rotate_heads(q, k, v, cos, sin, *parts, True)
        return (*(part.unflatten(0, (batch, length)) for part in parts), None, None)


def _split_heads(product: Tensor, size: int) -> Tensor:
    """Return a product [B, T, H D] as heads [B, H, T, D]."""
    product = product if product.stride(-1) == 1 else product.contiguous()
    return product.unflatten(-1, (-1, size)).transpose(1, 2)


def can_rotate(q: Tensor, k: Tensor, cos: Tensor) -> bool:
    """Tell whether the kernel rotates queries [B, H, T, D] and keys [B, K, T, D] by cosines
    [1 or B, T, D], one for each of their dimensions.
    """
    num_texts, heads, length, size = q.shape
    angles = (length, size)
    return (
        size % 2 == 0
        and heads * size <= MAX_VALUES
        and k.shape[2:] == angles == cos.shape[1:]
        and cos.shape[0] in (1, num_texts)
    )


def rotate_split_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return rotated queries [B, H, T, D] and keys [B, K, T, D] in one launch, without gradients.
    Cosines and sines [1 or B, T, D] have equal halves.
    """
    batch, _, length, size = q.shape
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    cos, sin = (x.contiguous().expand(batch, -1, -1) for x in (cos, sin))
    rows = [x.new_empty(batch * length, x.shape[1] * size) for x in (q, k)]
    _launch_rotate_heads(q, k, None, cos, sin, rows[0], rows[1], None, False)
    queries, keys = (x.view(batch, length, -1, size).transpose(1, 2) for x in rows)
    return queries, keys


def rotate_heads(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `rotate_heads_reference` does, in one launch each way where the kernel runs."""
    if not takes_gradients(q):
        return rotate_heads_reference(q, k, v, cos, sin)
    rotated: tuple[Tensor, Tensor, Tensor] = _RotatedHeads.apply(q, k, v, cos, sin)
    return rotated
