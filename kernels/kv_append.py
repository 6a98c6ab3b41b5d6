"""Append one layer's new keys and values after a row's committed and uncommitted tokens, in one
launch.

Shapes: B batch, T slots, H key-value heads, D head size, N new nodes. The reference in torch comes
first; it is also the path on a CPU. It takes two indexed writes and the arithmetic of their slots
per layer and forward; the kernel takes one launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatch import jit, runs_on, tl, triton


def kv_append_reference(
    store: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, num_pending: int
) -> None:
    """Write node i of keys and values [B, H, N, D] to slot lengths[b] + num_pending + i of `store`
    [2, B, T, H, D].
    """
    batch, _, num_nodes, _ = keys.shape
    rows = torch.arange(batch, device=keys.device)[:, None]
    slots = lengths[:, None] + (num_pending + torch.arange(num_nodes, device=keys.device))
    store[0, rows, slots] = keys.transpose(1, 2)
    store[1, rows, slots] = values.transpose(1, 2)


@jit
def _append_kernel(  # type: ignore[no-untyped-def]
    store_ptr,
    keys_ptr,
    values_ptr,
    lengths_ptr,
    num_pending,
    store_stride_half,
    store_stride_b,
    store_stride_t,
    keys_stride_b,
    keys_stride_h,
    keys_stride_n,
    values_stride_b,
    values_stride_h,
    values_stride_n,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the keys or values of one node; grid [N, B, 2]."""
    node = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < HEADS) & (dim < HEAD_SIZE)
    slot = tl.load(lengths_ptr + batch) + num_pending + node
    store_ptr += batch * store_stride_b + slot * store_stride_t
    offset = head * HEAD_SIZE + dim
    if tl.program_id(2) == 0:
        x = tl.load(
            keys_ptr + batch * keys_stride_b + node * keys_stride_n + (head * keys_stride_h + dim),
            mask=inside,
        )
        tl.store(store_ptr + offset, x, mask=inside)
    else:
        x = tl.load(
            values_ptr
            + batch * values_stride_b
            + node * values_stride_n
            + (head * values_stride_h + dim),
            mask=inside,
        )
        tl.store(store_ptr + store_stride_half + offset, x, mask=inside)


@torch.library.custom_op("spectrain::kv_append", mutates_args={"store"})
def _launch_append(
    store: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, num_pending: int
) -> None:
    """Launch the kernel."""
    batch, heads, num_nodes, head_size = keys.shape
    keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values))
    assert store[0, 0, 0].is_contiguous()
    with torch.cuda.device_of(store):
        _append_kernel[(num_nodes, batch, 2)](
            store,
            keys,
            values,
            lengths,
            num_pending,
            *store.stride()[:3],
            *keys.stride()[:3],
            *values.stride()[:3],
            HEADS=heads,
            HEAD_SIZE=head_size,
            BLOCK_H=triton.next_power_of_2(heads),
            BLOCK_D=triton.next_power_of_2(head_size),
            num_warps=4,
        )


@_launch_append.register_fake
def _(*args: Any) -> None:
    return None


def kv_append(
    store: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, num_pending: int
) -> None:
    """Do what `kv_append_reference` does, in one launch where the kernel runs."""
    if runs_on(store.device):
        _launch_append(store, keys, values, lengths, num_pending)
    else:
        kv_append_reference(store, keys, values, lengths, num_pending)
