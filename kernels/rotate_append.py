"""Rotate the queries and keys of new nodes, and append keys and values to a cache, in one launch.

Shapes: B batch, N new nodes, H query heads, K key-value heads, D head size, T slots, R positions.
The references in torch come first; they take the rotation's ten operations and two indexed writes.
In the kernel a program owns the queries, the keys or the values of one node. A drafter has a table
of all positions; a target has the cosines and sines of the nodes of its forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatch import jit, runs_on, tl, triton
from .kv_append import kv_append_reference


def rotate_append_reference(
    store: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    positions: Tensor,
    lengths: Tensor,
    num_pending: int,
) -> Tensor:
    """Return rotated queries [B, H, N, D] of products q [B, N, H D]. Keys and values, of products k
    and v [B, N, K D], are written to the slots of `store` [2, B, T, K, D] from lengths[b] +
    num_pending on. `table` [R, 2, D / 2] has the cosines and sines of positions [B, N].
    """
    cos, sin = table[positions].unbind(-2)
    return rotate_append_angles_reference(store, q, k, v, cos, sin, lengths, num_pending)


def rotate_append_angles_reference(
    store: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    num_pending: int,
) -> Tensor:
    """Do what `rotate_append_reference` does, with the cosines and sines of every node in the first
    D / 2 numbers of `cos` and `sin` [1 or B, N, >= D / 2].
    """
    size = store.shape[-1]
    queries, keys, values = (x.unflatten(-1, (-1, size)).transpose(1, 2) for x in (q, k, v))
    cos, sin = (x[..., : size // 2].float() for x in (cos, sin))  # [B, N, D / 2]

    def rotate(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([first * c - second * s, second * c + first * s], dim=-1).to(x.dtype)

    kv_append_reference(store, rotate(keys), values, lengths, num_pending)
    return rotate(queries)


@jit
def _rotate_heads(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, cos, sin, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the rotated heads of one node."""
    head = tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < HEADS) & (dim < SIZE // 2)
    offset = head * SIZE + dim
    first = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + offset + SIZE // 2, mask=inside, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + offset, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(out_ptr + offset + SIZE // 2, (second * cos + first * sin).to(kind), mask=inside)


@jit
def _rotate_append_kernel(  # type: ignore[no-untyped-def]
    store_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    lengths_ptr,
    out_ptr,
    store_stride_half,
    store_stride_b,
    store_stride_t,
    q_stride_b,
    q_stride_n,
    k_stride_b,
    k_stride_n,
    v_stride_b,
    v_stride_n,
    angle_stride_b,
    angle_stride_n,
    num_pending,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Take the queries, keys or values of one node; grid [N, B, 3]. With positions, cosines and
    sines are those of a table of positions.
    """
    node = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    row = batch * tl.num_programs(0) + node
    slot = tl.load(lengths_ptr + batch) + num_pending + node
    store_ptr += batch * store_stride_b + slot * store_stride_t
    dim = tl.arange(0, BLOCK_D)
    if positions_ptr is not None:
        angle = tl.load(positions_ptr + row) * angle_stride_n + dim
    else:
        angle = batch * angle_stride_b + node * angle_stride_n + dim
    is_dim = dim < SIZE // 2
    cos = tl.load(cos_ptr + angle, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    if tl.program_id(2) == 0:
        q_ptr += batch * q_stride_b + node * q_stride_n
        out_ptr += row * HEADS * SIZE
        _rotate_heads(q_ptr, out_ptr, cos, sin, HEADS, SIZE, BLOCK_H, BLOCK_D)
    elif tl.program_id(2) == 1:
        k_ptr += batch * k_stride_b + node * k_stride_n
        _rotate_heads(k_ptr, store_ptr, cos, sin, KV_HEADS, SIZE, BLOCK_K, BLOCK_D)
    else:
        v_ptr += batch * v_stride_b + node * v_stride_n
        column = tl.arange(0, 2 * BLOCK_K * BLOCK_D)
        inside = column < KV_HEADS * SIZE
        values = tl.load(v_ptr + column, mask=inside)
        tl.store(store_ptr + store_stride_half + column, values, mask=inside)


@torch.library.custom_op("spectrain::rotate_append", mutates_args={"store"})
def _launch_rotate_append(
    store: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    lengths: Tensor,
    num_pending: int,
) -> Tensor:
    """Launch the kernel, with cosines and sines of positions [B, N], or of nodes."""
    batch, num_nodes, _ = q.shape
    kv_heads, size = store.shape[-2:]
    assert store[0, 0, 0].is_contiguous() and cos.stride() == sin.stride() and cos.stride(-1) == 1
    out = _empty_queries(store, q).transpose(1, 2)
    heads = out.shape[2]
    angle_strides = (0, cos.stride(0)) if positions is not None else cos.stride()[:2]
    with torch.cuda.device_of(store):
        _rotate_append_kernel[(num_nodes, batch, 3)](
            store,
            q,
            k,
            v,
            cos,
            sin,
            positions,
            lengths,
            out,
            *store.stride()[:3],
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            *angle_strides,
            num_pending,
            HEADS=heads,
            KV_HEADS=kv_heads,
            SIZE=size,
            BLOCK_H=triton.next_power_of_2(heads),
            BLOCK_K=triton.next_power_of_2(kv_heads),
            BLOCK_D=triton.next_power_of_2(size // 2),
            num_warps=8,
        )
    return out.transpose(1, 2)


@_launch_rotate_append.register_fake
def _empty_queries(store: Tensor, q: Tensor, *args: Any) -> Tensor:
    """Allocate the queries, laid out as [B, N, H, D]."""
    size = store.shape[-1]
    return q.new_empty(*q.shape[:2], q.shape[2] // size, size).transpose(1, 2)


def rotate_append(
    store: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    positions: Tensor,
    lengths: Tensor,
    num_pending: int,
) -> Tensor:
    """Do what `rotate_append_reference` does, in one launch where the kernel runs."""
    if not runs_on(store.device):
        rest = table, positions, lengths, num_pending
        return rotate_append_reference(store, q, k, v, *rest)
    cos, sin = table.unbind(1)
    queries: Tensor = _launch_rotate_append(
        store, *_contiguous_rows(q, k, v), cos, sin, positions, lengths, num_pending
    )
    return queries


def rotate_append_angles(
    store: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    num_pending: int,
) -> Tensor:
    """Do what `rotate_append_angles_reference` does, in one launch where the kernel runs."""
    if not runs_on(store.device):
        rest = cos, sin, lengths, num_pending
        return rotate_append_angles_reference(store, q, k, v, *rest)
    cos, sin = (x.contiguous().expand(len(q), -1, -1) for x in (cos, sin))
    queries: Tensor = _launch_rotate_append(
        store, *_contiguous_rows(q, k, v), cos, sin, None, lengths, num_pending
    )
    return queries


def _contiguous_rows(*rows: Tensor) -> list[Tensor]:
    return [x if x.stride(-1) == 1 else x.contiguous() for x in rows]
