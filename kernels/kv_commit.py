"""Commit a round: move the accepted path's keys, values and captured features to their slots in one
launch.

Shapes: L layers, B batch, T slots, H key-value heads, D head size, N nodes of a tree, P steps of
the longest path, L' captured layers of width D'. A row's tree lies in the slots after its committed
tokens, node i in slot lengths + i. The reference in torch comes first; it is also the path on a
CPU. In the kernel a program owns some columns of one row's keys, values or features in one layer,
so no other program writes what it reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatch import jit, runs_on, tl, triton


def kv_commit_reference(
    storage: Tensor,
    lengths: Tensor,
    path: Tensor,
    counts: Tensor,
    hidden: Tensor | None = None,
    fresh: Tensor | None = None,
    are_counted: bool = False,
) -> None:
    """Commit the first `counts` [B] nodes of `path` [B, P] in `storage` [L, 2, B, T, H, D];
    `lengths` [B] grow by `counts`.

    `fresh` [B, P, L', D'] receives the features `hidden` [B, N, L', D'] of every entry of the path,
    accepted or not. A path ascends, so path[b, i] >= i, and the kernel never overwrites a node
    before it is read. Lengths that `are_counted` have grown before.
    """
    if not are_counted:
        lengths += counts
    starts = lengths - counts
    batch, num_steps = path.shape
    steps = torch.arange(num_steps, device=path.device)
    # past the counts a slot is copied to itself
    slots = (starts[:, None] + steps).clamp(max=storage.shape[3] - 1)
    sources = torch.where(steps < counts[:, None], starts[:, None] + path, slots)
    rows = torch.arange(batch, device=path.device)[:, None]
    storage[:, :, rows, slots] = storage[:, :, rows, sources]
    if hidden is not None:
        assert fresh is not None
        fresh.copy_(hidden[rows, path])


# Nodes moved at once: more than most rounds accept, so that their loads overlap.
NODES_PER_STEP = 8
# With 8 heads of 128 and 32 layers a row has 128 programs, about one for each of an H200's 132
# multiprocessors. With 4 warps a program has 16 KB of float32 in flight, which takes 32 registers
# of a thread. Not yet timed.
COLUMNS_PER_PROGRAM = 512


@jit
def _move_rows(  # type: ignore[no-untyped-def]
    source_ptr,
    target_ptr,
    path_ptr,
    num_moved,
    source_stride,
    target_stride,
    columns,
    WIDTH: tl.constexpr,
    NODES: tl.constexpr,
    INPLACE: tl.constexpr,
):
    """Set target[i] = source[path[i]] for i < num_moved, in some columns of rows of WIDTH.

    In place, NODES rows are read before any of them is written; later rows are read from later
    slots.
    """
    for start in range(0, num_moved, NODES):
        step = start + tl.arange(0, NODES)
        moved = step < num_moved
        node = tl.load(path_ptr + step, mask=moved, other=0)
        if INPLACE:
            moved = moved & (node != step)
        moved = moved[:, None] & (columns < WIDTH)[None, :]
        rows = tl.load(source_ptr + node[:, None] * source_stride + columns[None, :], mask=moved)
        if INPLACE:
            tl.debug_barrier()  # all threads have read their part
        tl.store(
            target_ptr + step[:, None].to(tl.int64) * target_stride + columns[None, :],
            rows,
            mask=moved,
        )


@jit
def _commit_kernel(  # type: ignore[no-untyped-def]
    storage_ptr,
    lengths_ptr,
    path_ptr,
    counts_ptr,
    hidden_ptr,
    fresh_ptr,
    layer_stride,
    half_stride,
    row_stride,
    slot_stride,
    hidden_stride_b,
    hidden_stride_n,
    fresh_stride_b,
    fresh_stride_p,
    num_halves,
    num_steps,
    WIDTH: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    NODES: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """Move some columns of the keys or values (a half) of one layer and row; programs past the
    halves move features.

    Grid [halves * blocks of WIDTH columns + blocks of FEATURES columns, B].
    """
    blocks: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    part = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    path_ptr += batch * num_steps
    half = (part // blocks).to(tl.int64)
    if half < num_halves:
        columns = part % blocks * COLUMNS + tl.arange(0, COLUMNS)
        storage_ptr += half // 2 * layer_stride + half % 2 * half_stride + batch * row_stride
        count = tl.load(counts_ptr + batch)
        start = tl.load(lengths_ptr + batch)
        storage_ptr += (start - count if COUNTED else start) * slot_stride
        count = count.to(tl.int32)
        _move_rows(
            storage_ptr,
            storage_ptr,
            path_ptr,
            count,
            slot_stride,
            slot_stride,
            columns,
            WIDTH,
            NODES,
            True,
        )
    elif hidden_ptr is not None:
        columns = (part - num_halves * blocks) * COLUMNS + tl.arange(0, COLUMNS)
        hidden_ptr += batch * hidden_stride_b
        fresh_ptr += batch * fresh_stride_b
        _move_rows(
            hidden_ptr,
            fresh_ptr,
            path_ptr,
            num_steps,
            hidden_stride_n,
            fresh_stride_p,
            columns,
            FEATURES,
            NODES,
            False,
        )


@torch.library.custom_op("spectrain::kv_commit", mutates_args={"storage", "lengths", "fresh"})
def _launch_commit(
    storage: Tensor,
    lengths: Tensor,
    path: Tensor,
    counts: Tensor,
    hidden: Tensor | None,
    fresh: Tensor | None,
    are_counted: bool = False,
) -> None:
    """Launch the kernel, then advance the lengths, which all of its programs read, unless they
    `are_counted` already.
    """
    batch, num_steps = path.shape
    num_halves = 2 * storage.shape[0]
    width = storage[0, 0, 0, 0].numel()
    features = 0
    assert storage[0, 0, 0, 0].is_contiguous() and storage.shape[2] == batch
    hidden_strides = [0, 0]
    fresh_strides = [0, 0]
    if hidden is not None:
        assert fresh is not None and fresh[0, 0].is_contiguous() and fresh.dtype == hidden.dtype
        hidden = hidden if hidden[0, 0].is_contiguous() else hidden.contiguous()
        features = hidden[0, 0].numel()
        hidden_strides = [*hidden.stride()[:2]]
        fresh_strides = [*fresh.stride()[:2]]
    parts = num_halves * triton.cdiv(width, COLUMNS_PER_PROGRAM) + triton.cdiv(
        features, COLUMNS_PER_PROGRAM
    )
    with torch.cuda.device_of(storage):
        _commit_kernel[(parts, batch)](
            storage,
            lengths.contiguous(),
            path.contiguous(),
            counts.contiguous(),
            hidden,
            fresh,
            *storage.stride()[:4],
            *hidden_strides,
            *fresh_strides,
            num_halves,
            num_steps,
            WIDTH=width,
            FEATURES=features,
            COLUMNS=COLUMNS_PER_PROGRAM,
            NODES=NODES_PER_STEP,
            COUNTED=are_counted,
            num_warps=4,
        )
    if not are_counted:
        lengths += counts


@_launch_commit.register_fake
def _(*args: Any) -> None:
    return None


def kv_commit(
    storage: Tensor,
    lengths: Tensor,
    path: Tensor,
    counts: Tensor,
    hidden: Tensor | None = None,
    fresh: Tensor | None = None,
    are_counted: bool = False,
) -> None:
    """Do what `kv_commit_reference` does, in place, without synchronisation, in one launch where
    the kernel runs.
    """
    if runs_on(storage.device):
        _launch_commit(storage, lengths, path, counts, hidden, fresh, are_counted)
    else:
        kv_commit_reference(storage, lengths, path, counts, hidden, fresh, are_counted)
