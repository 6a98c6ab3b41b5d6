"""Kernels of decoder layers on a CPU, compiled by Numba: rotation, appending to the cache, and
attention of several texts.

Shapes: B texts, N rows (tokens or tree nodes) of each, M appended nodes of each, H query heads, K
key-value heads, d head size, T key slots.

Tensors are passed by address. A node's bits are those of the same token alone, whatever other nodes
lie between its ancestors, whatever other texts there are, and however many threads share the work
(`attention_heads`, `team`).

Numba keeps compiled code beside this file, or in the user's cache folder, until this file changes;
save this file too after a change of vectors.py, attention_tiles.py, attention_heads.py or team.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from spectrain.kernels.tree_attention import Visibility

from .attention_heads import attend_head
from .available import HEAD_STEP, has_cpu_kernels, working_memory
from .row_limits import list_row_limits
from .team import (
    call_part,
    count_members,
    current_team,
    job_floats,
    job_numbers,
    run_job,
)
from .vectors import (
    LANES,
    advance,
    compile_cached,
    compile_inline,
    compile_part,
    narrow,
    to_bytes,
    to_floats,
    to_halves,
    to_longs,
    widen,
)

SCALE_INDEX = 22  # of the job's numbers


@compile_inline
def attend_text(
    queries: Any,
    node_stride: int,
    head_stride: int,
    keys: Any,
    values: Any,
    slot_stride: int,
    num_prefix: int,
    num_appended: int,
    mask: Any,
    num_nodes: int,
    num_heads: int,
    num_key_heads: int,
    head_size: int,
    out: Any,
    scale: float,
    scratch: int,
    hidden: int,
) -> None:
    """Attend with queries [N, H, d] of these strides to the slots [T, K d] of a text, into [N, H
    d].
    """
    for head in range(num_key_heads):
        attend_head(
            queries,
            node_stride,
            head_stride,
            keys,
            values,
            slot_stride,
            num_prefix,
            num_appended,
            mask,
            num_nodes,
            num_heads,
            num_key_heads,
            head_size,
            out,
            np.float32(scale),
            scratch,
            hidden,
            head,
        )


@compile_inline
def rotate_append(
    heads: Any,
    cos: Any,
    sin: Any,
    keys: Any,
    values: Any,
    slot_stride: int,
    num_nodes: int,
    num_heads: int,
    num_key_heads: int,
    head_size: int,
) -> None:
    """Rotate queries and keys of heads [N, H + 2 K, d] in place by cosines and sines [N, d],
    rounding every product and sum, and write keys and values to the slots from the first on."""
    half = head_size // 2
    count = num_key_heads * head_size
    for n in range(num_nodes):
        row = n * (num_heads + 2 * num_key_heads) * head_size
        angle = n * head_size
        first_cos = carray(advance(cos, angle), (half,))
        second_cos = carray(advance(cos, angle + half), (half,))
        first_sin = carray(advance(sin, angle), (half,))
        second_sin = carray(advance(sin, angle + half), (half,))
        for h in range(num_heads + num_key_heads):
            start = row + h * head_size
            first = carray(advance(heads, start), (half,))
            second = carray(advance(heads, start + half), (half,))
            for d in range(half):
                x = first[d]
                y = second[d]
                a = narrow(widen(x) * widen(first_cos[d]), x)
                b = narrow(-widen(y) * widen(first_sin[d]), x)
                first[d] = narrow(widen(a) + widen(b), x)
                a = narrow(widen(y) * widen(second_cos[d]), x)
                b = narrow(widen(x) * widen(second_sin[d]), x)
                second[d] = narrow(widen(a) + widen(b), x)
        new = carray(advance(heads, row + num_heads * head_size), (2 * count,))
        new_keys = carray(advance(keys, n * slot_stride), (count,))
        new_values = carray(advance(values, n * slot_stride), (count,))
        for i in range(count):
            new_keys[i], new_values[i] = new[i], new[count + i]


@compile_inline
def _append_texts(job: Any, queries: Any, cos: Any, sin: Any, keys: Any, values: Any) -> None:
    """Rotate the heads of every text of the job, and append keys and values to its slots."""
    node_stride = job[2]
    slot_stride = job[6]
    num_appended = job[9]
    num_nodes = job[11]
    num_heads = job[12]
    num_key_heads = job[13]
    head_size = job[14]
    num_texts = job[19]
    first_slots = carray(to_longs(job[7]), (num_texts,))
    num_committed = carray(to_longs(job[8]), (num_texts,))
    for text in range(num_texts):
        node = text * num_nodes
        new = slot_stride * (first_slots[text] + num_committed[text] + num_appended - num_nodes)
        rotate_append(
            advance(queries, node * node_stride),
            advance(cos, node * head_size),
            advance(sin, node * head_size),
            advance(keys, new),
            advance(values, new),
            slot_stride,
            num_nodes,
            num_heads,
            num_key_heads,
            head_size,
        )


@compile_part
def append_part_half(team: int, part: int, member: int) -> None:
    """Rotate and append the heads of all texts of the job in bfloat16."""
    job = job_numbers(team)
    _append_texts(
        job,
        to_halves(job[1]),
        to_halves(job[20]),
        to_halves(job[21]),
        to_halves(job[4]),
        to_halves(job[5]),
    )


@compile_part
def append_part_float(team: int, part: int, member: int) -> None:
    """Rotate and append the heads of all texts of the job in float32."""
    job = job_numbers(team)
    _append_texts(
        job,
        to_floats(job[1]),
        to_floats(job[20]),
        to_floats(job[21]),
        to_floats(job[4]),
        to_floats(job[5]),
    )


@compile_inline
def _attend_part(
    team: int, queries: Any, keys: Any, values: Any, out: Any, part: int, member: int
) -> None:
    job = job_numbers(team)
    scale = job_floats(team)[2 * SCALE_INDEX]
    node_stride = job[2]
    head_stride = job[3]
    slot_stride = job[6]
    starts = job[7]
    lengths = job[8]
    num_appended = job[9]
    masks = job[10]
    num_nodes = job[11]
    num_heads = job[12]
    num_key_heads = job[13]
    head_size = job[14]
    text = part // num_key_heads
    hidden = job[18]
    node = text * num_nodes
    shift = slot_stride * carray(to_longs(starts), (text + 1,))[text]
    attend_head(
        advance(queries, node * node_stride),
        node_stride,
        head_stride,
        advance(keys, shift),
        advance(values, shift),
        slot_stride,
        carray(to_longs(lengths), (text + 1,))[text],
        num_appended,
        to_bytes(masks + node * num_appended),
        num_nodes,
        num_heads,
        num_key_heads,
        head_size,
        advance(out, node * num_heads * head_size),
        scale,
        job[16] + member * job[17],
        0 if hidden == 0 else hidden + 8 * node,
        part % num_key_heads,
    )


@compile_part
def attend_part_half(team: int, part: int, member: int) -> None:
    """Attend by one key-value head of a text of the job in bfloat16, as so many-th thread of the
    team.
    """
    job = job_numbers(team)
    _attend_part(
        team,
        to_halves(job[1]),
        to_halves(job[4]),
        to_halves(job[5]),
        to_halves(job[15]),
        part,
        member,
    )


@compile_part
def attend_part_float(team: int, part: int, member: int) -> None:
    """Attend by one key-value head of a text of the job in float32."""
    job = job_numbers(team)
    _attend_part(
        team,
        to_floats(job[1]),
        to_floats(job[4]),
        to_floats(job[5]),
        to_floats(job[15]),
        part,
        member,
    )


@compile_cached
def attend_texts(
    append: int,
    attend: int,
    queries: int,
    node_stride: int,
    head_stride: int,
    cos: int,
    sin: int,
    keys: int,
    values: int,
    slot_stride: int,
    starts: int,
    lengths: int,
    num_texts: int,
    num_appended: int,
    masks: int,
    num_nodes: int,
    num_heads: int,
    num_key_heads: int,
    head_size: int,
    out: int,
    scale: float,
    scratch: int,
    scratch_bytes: int,
    hidden: int,
    team: int,
    members: int,
) -> None:
    """Attend with queries [B, N, H, d] of these strides to the slots of each text, into [B, N, H
    d], by masks [B, N, M] and the functions of parts for one type of numbers (`append_part_half`,
    `attend_part_half`).

    The slots of a text begin with number `starts` [B] of all slots [.., K d], and `lengths` [B] of
    them are committed. Of these, each node does not see the first `hidden` [B, N], unless that is
    0. Unless `cos` is 0, the queries are heads [B, N, H + 2 K, d], which are rotated first, and
    whose keys and values are appended to the slots. So many threads of the team share the key-value
    heads of the texts, each with so many bytes of `scratch`.
    """
    job = job_numbers(team)
    parts = num_texts * num_key_heads
    job[0], job[1], job[2], job[3], job[4], job[5] = (
        attend,
        queries,
        node_stride,
        head_stride,
        keys,
        values,
    )
    job[6], job[7], job[8], job[9], job[10], job[11] = (
        slot_stride,
        starts,
        lengths,
        num_appended,
        masks,
        num_nodes,
    )
    job[12], job[13], job[14], job[15], job[16] = num_heads, num_key_heads, head_size, out, scratch
    job[17], job[18], job[19], job[20], job[21] = scratch_bytes, hidden, num_texts, cos, sin
    job_floats(team)[2 * SCALE_INDEX] = scale
    if cos != 0:
        call_part(append, team, 0, 0)
    run_job(team, min(members, parts), parts)


@cache
def select_attention(dtype: torch.dtype) -> Callable[..., None]:
    """Return the kernel for tensors of this type, which is compiled, or loaded, at its first
    call.
    """
    if dtype == torch.bfloat16:
        parts = append_part_half().address, attend_part_half().address
    else:
        parts = append_part_float().address, attend_part_float().address
    return partial(attend_texts, *parts)


def prepare_attention(dtype: torch.dtype) -> None:
    """Load the kernel of a type, or compile it where this machine has not."""
    visibility = Visibility(
        torch.zeros(1, dtype=torch.int64), 0, torch.ones(1, 1, 1).bool(), torch.zeros(1, 1), None
    )
    x = torch.zeros(1, 3, 1, HEAD_STEP, dtype=dtype)
    attend_cached(x[:, :1], x[:, :1], x[:, :1], visibility, 1.0)


def attention_size(num_rows: int, length: int, head_size: int) -> int:
    """Return the float64 numbers of working memory of attention with so many queries of a
    key-value head to so many slots.
    """
    # Queries, scores and totals of padded rows, and the sums of the rows.
    padded = num_rows + LANES - 1
    return (padded * (head_size + length + 1) + num_rows * head_size) // 2 + 1


def attention_memory(
    visibility: Visibility, num_heads: int, num_key_heads: int, head_size: int
) -> Tensor:
    """Return the working memory [threads, size] of attention with this visibility, which
    suffices for norms too.
    """
    _, num_nodes, num_appended = visibility.tree.shape
    num_rows = num_nodes * (num_heads // num_key_heads)
    length = visibility.longest + num_appended
    size = attention_size(num_rows, length, head_size)
    members = count_members()
    return working_memory(members * size)[: members * size].view(members, size)


def can_attend(
    queries: Tensor, keys: Tensor, values: Tensor, softcap: float | None, sinks: Tensor | None
) -> bool:
    """Return whether `attend_cached` computes this attention with keys [B, T, K, d]. This depends
    on the layer alone: all its forwards sum in one way."""
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (queries, keys, values))
    if softcap is not None or sinks is not None or learns:
        return False
    return (
        queries.dtype == keys.dtype
        and keys.shape[-1] % HEAD_STEP == 0
        and values.shape == keys.shape
    )


def attend_if_served(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visibility: Visibility,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor | None:
    """Compute `attend_cached` where kernels serve this attention."""
    if not has_cpu_kernels(queries.dtype, queries.device):
        return None
    if not can_attend(queries, keys, values, softcap, sinks):
        return None
    return attend_cached(queries, keys, values, visibility, scale, window)


def attend_cached(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visibility: Visibility,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Compute softmax(q k^T * scale) v over the slots that each node sees, [B, H, N, d], laid out
    as [B, N, H, d]. Queries are [B, H, N, d]; keys and values are [B, T, K, d] with the newest
    nodes in them."""
    attend = select_attention(queries.dtype)
    batch, num_heads, num_nodes, head_size = queries.shape
    out = queries.new_empty(batch, num_nodes, num_heads, head_size)
    queries = queries if queries.stride(-1) == 1 else queries.contiguous()
    memory = attention_memory(visibility, num_heads, keys.shape[2], head_size)
    team = (current_team().address, len(memory))
    scratch = (memory.data_ptr(), memory.stride(0) * memory.itemsize)
    for row, (slots, mask, hidden) in enumerate(list_row_limits(visibility, window)):
        first = slots.data_ptr()
        attend(
            queries[row].data_ptr(),
            queries.stride(2),
            queries.stride(1),
            0,
            0,
            keys[row].data_ptr(),
            values[row].data_ptr(),
            keys.stride(1),
            first,
            first + slots.itemsize,
            1,
            visibility.tree.shape[2],
            mask.data_ptr(),
            num_nodes,
            num_heads,
            keys.shape[2],
            head_size,
            out[row].data_ptr(),
            scale,
            *scratch,
            0 if hidden is None else hidden.data_ptr(),
            *team,
        )
    return out.transpose(1, 2)


def attend_token_if_served(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor | None:
    """Compute `attend_token` where kernels serve this attention."""
    slots = keys.transpose(1, 2), values.transpose(1, 2)
    if not has_cpu_kernels(queries.dtype, queries.device):
        return None
    if not can_attend(queries, *slots, softcap, sinks):
        return None
    assert mask is None or mask.dtype == torch.bool
    return attend_token(queries, keys, values, mask, scale)


def attend_token(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Compute the same attention with one query of each text, [B, H, 1, d], to keys and values [B,
    K, T, d], of which `mask` [B, 1, 1, T] marks the visible ones."""
    rows = []
    for row in range(len(queries)):
        slots = [x[row : row + 1].transpose(1, 2) for x in (keys, values)]
        if mask is not None:
            slots = [x[:, mask[row, 0, 0]] for x in slots]
        length = torch.tensor([slots[0].shape[1] - 1])
        visibility = Visibility(
            length, int(length), torch.ones(1, 1, 1, dtype=torch.bool), length[:, None], None
        )
        key_slots, value_slots = (x.contiguous() for x in slots)
        rows.append(
            attend_cached(queries[row : row + 1], key_slots, value_slots, visibility, scale)
        )
    return torch.cat(rows)
