"""Kernels of decoder layers on a CPU, compiled by Numba: attention, with what lies between two linears.

Shapes: N rows (tokens or tree nodes), M appended nodes, H query heads, K key-value heads, G = H / K, d head size, T key slots,
P = N G queries that share a key-value head, padded to a multiple of 8.

Tensors are passed by address. Attention reads every key and value once. It widens them to float64 and adds in the order of the
slots: scores [T, P] in the order of d, weights and values in the order of T. A key that a node does not see adds 0. So a
node's float64 bits are those of the same token alone, whatever other nodes lie between its ancestors.

Numba keeps compiled code beside this file, or in the user's cache folder, until this file changes; save this file too after a
change of cpu_vectors.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from .cpu_vectors import (
    LANES,
    advance,
    compile_cached,
    compile_inline,
    exp_columns,
    make_product,
    narrow,
    to_bytes,
    to_doubles,
    to_halves,
    widen,
)

BLOCK = 48  # keys or values that are widened at a time
HIDDEN_SCORE = -1e300

multiply_8x1, multiply_1x1 = make_product(8, 1), make_product(1, 1)
multiply_6x2, multiply_3x2, multiply_1x2 = make_product(6, 2), make_product(3, 2), make_product(1, 2)


@compile_inline
def _multiply(
    rows: int, vectors: int, a: int, a_row: int, a_column: int, b: int, b_row: int, c: int, c_row: int, length: int
) -> None:
    """Add A [rows, length] B [length, 8 vectors] to C [rows, 8 vectors]; arguments as in `make_product`."""
    j = 0
    while j + 2 <= vectors:
        shift, r = 8 * j * LANES, 0
        while r + 6 <= rows:
            multiply_6x2(a + 8 * r * a_row, a_row, a_column, b + shift, b_row, c + 8 * r * c_row + shift, c_row, length)
            r += 6
        while r + 3 <= rows:
            multiply_3x2(a + 8 * r * a_row, a_row, a_column, b + shift, b_row, c + 8 * r * c_row + shift, c_row, length)
            r += 3
        while r < rows:
            multiply_1x2(a + 8 * r * a_row, a_row, a_column, b + shift, b_row, c + 8 * r * c_row + shift, c_row, length)
            r += 1
        j += 2
    if j < vectors:
        shift, r = 8 * j * LANES, 0
        while r + 8 <= rows:
            multiply_8x1(a + 8 * r * a_row, a_row, a_column, b + shift, b_row, c + 8 * r * c_row + shift, c_row, length)
            r += 8
        while r < rows:
            multiply_1x1(a + 8 * r * a_row, a_row, a_column, b + shift, b_row, c + 8 * r * c_row + shift, c_row, length)
            r += 1


@compile_inline
def _widen_rows(source: Any, start: int, row_stride: int, rows: int, width: int, target: int) -> None:
    """Widen rows [rows, width] of numbers, which begin at `start`, to float64."""
    for r in range(rows):
        x = carray(advance(source, start + r * row_stride), (width,))
        y = carray(to_doubles(target + 8 * r * width), (width,))
        for i in range(width):
            y[i] = widen(x[i])


@compile_inline
def _hide_slots(scores: Any, mask: Any, num_prefix: int, num_appended: int, num_nodes: int, group: int, padded: int) -> None:
    """Lower the scores [T, P] of the appended nodes that a node does not see by `mask` [N, M]."""
    for m in range(num_appended):
        for n in range(num_nodes):
            if not mask[n * num_appended + m]:
                for g in range(group):
                    scores[(num_prefix + m) * padded + n * group + g] = HIDDEN_SCORE


@compile_inline
def _attend_head(
    keys: Any, values: Any, start: int, slot_stride: int, num_prefix: int, num_appended: int, mask: Any, num_nodes: int,
    group: int, head_size: int, out: Any, out_start: int, out_stride: int, scratch: int,
) -> None:  # fmt: skip
    """Attend with the queries of one key-value head, which lie first in `scratch`: transposed and scaled, [d, P]."""
    num_rows, length = num_nodes * group, num_prefix + num_appended
    vectors = (num_rows + LANES - 1) // LANES
    padded = vectors * LANES
    # 1. Scores [T, P], and a block of widened keys.
    scores = scratch + 8 * head_size * padded
    block = scores + 8 * length * padded
    all_scores = carray(to_doubles(scores), (length * padded,))
    all_scores[:] = 0.0
    for first in range(0, length, BLOCK):
        count = min(BLOCK, length - first)
        _widen_rows(keys, start + first * slot_stride, slot_stride, count, head_size, block)
        _multiply(count, vectors, block, head_size, 1, scratch, padded, scores + 8 * first * padded, padded, head_size)
    _hide_slots(all_scores, mask, num_prefix, num_appended, num_nodes, group, padded)
    # 2. Weights, in place, and their sums [P].
    all_totals = block + 8 * BLOCK * head_size
    for j in range(vectors):
        exp_columns(scores + 8 * j * LANES, padded, length, all_totals + 8 * j * LANES)
    # 3. Weighted values [P, d].
    all_sums, totals = all_totals + 8 * padded, carray(to_doubles(all_totals), (padded,))
    carray(to_doubles(all_sums), (num_rows * head_size,))[:] = 0.0
    for first in range(0, length, BLOCK):
        count = min(BLOCK, length - first)
        _widen_rows(values, start + first * slot_stride, slot_stride, count, head_size, block)
        weights = scores + 8 * first * padded
        _multiply(num_rows, head_size // LANES, weights, 1, padded, block, head_size, all_sums, head_size, count)
    for r in range(num_rows):
        result = carray(advance(out, r // group * out_stride + out_start + r % group * head_size), (head_size,))
        sums = carray(to_doubles(all_sums + 8 * r * head_size), (head_size,))
        for d in range(head_size):
            result[d] = narrow(np.float32(sums[d] / totals[r]), result[d])


@compile_inline
def _attend(
    queries: Any, node_stride: int, head_stride: int, keys: Any, values: Any, slot_stride: int, num_prefix: int,
    num_appended: int, mask: Any, num_nodes: int, num_heads: int, num_key_heads: int, head_size: int, out: Any, scale: float,
    scratch: int,
) -> None:  # fmt: skip
    group = num_heads // num_key_heads
    padded = (num_nodes * group + LANES - 1) // LANES * LANES
    transposed = carray(to_doubles(scratch), (head_size * padded,))
    transposed[:] = 0.0
    for head in range(num_key_heads):
        for r in range(num_nodes * group):
            q = carray(advance(queries, r // group * node_stride + (head * group + r % group) * head_stride), (head_size,))
            for d in range(head_size):
                transposed[d * padded + r] = widen(q[d]) * scale
        _attend_head(
            keys, values, head * head_size, slot_stride, num_prefix, num_appended, mask, num_nodes, group, head_size,
            out, head * group * head_size, num_heads * head_size, scratch,
        )  # fmt: skip


@compile_inline
def _rotate_append(
    heads: Any, cos: Any, sin: Any, keys: Any, values: Any, slot_stride: int, num_nodes: int, num_heads: int,
    num_key_heads: int, head_size: int,
) -> None:  # fmt: skip
    """Rotate queries and keys of heads [N, H + 2 K, d] in place by cosines and sines [N, d], rounding every product and sum,
    and write keys and values to the slots from the first on."""
    half, count = head_size // 2, num_key_heads * head_size
    for n in range(num_nodes):
        row, angle = n * (num_heads + 2 * num_key_heads) * head_size, n * head_size
        first_cos, second_cos = carray(advance(cos, angle), (half,)), carray(advance(cos, angle + half), (half,))
        first_sin, second_sin = carray(advance(sin, angle), (half,)), carray(advance(sin, angle + half), (half,))
        for h in range(num_heads + num_key_heads):
            start = row + h * head_size
            first, second = carray(advance(heads, start), (half,)), carray(advance(heads, start + half), (half,))
            for d in range(half):
                x, y = first[d], second[d]
                a, b = narrow(widen(x) * widen(first_cos[d]), x), narrow(-widen(y) * widen(first_sin[d]), x)
                first[d] = narrow(widen(a) + widen(b), x)
                a, b = narrow(widen(y) * widen(second_cos[d]), x), narrow(widen(x) * widen(second_sin[d]), x)
                second[d] = narrow(widen(a) + widen(b), x)
        new = carray(advance(heads, row + num_heads * head_size), (2 * count,))
        new_keys, new_values = (
            carray(advance(keys, n * slot_stride), (count,)),
            carray(advance(values, n * slot_stride), (count,)),
        )
        for i in range(count):
            new_keys[i], new_values[i] = new[i], new[count + i]


@compile_cached
def attend_half(
    queries: int, node_stride: int, head_stride: int, keys: int, values: int, slot_stride: int, num_prefix: int,
    num_appended: int, mask: int, num_nodes: int, num_heads: int, num_key_heads: int, head_size: int, out: int, scale: float,
    scratch: int,
) -> None:  # fmt: skip
    """Attend in bfloat16 with queries [N, H, d] of these strides to the slots [T, K d] of a text, into [N, H d]."""
    _attend(
        to_halves(queries), node_stride, head_stride, to_halves(keys), to_halves(values), slot_stride, num_prefix, num_appended,
        to_bytes(mask), num_nodes, num_heads, num_key_heads, head_size, to_halves(out), scale, scratch,
    )  # fmt: skip


@compile_cached
def rotate_attend_half(
    heads: int, cos: int, sin: int, keys: int, values: int, slot_stride: int, num_prefix: int, num_appended: int, mask: int,
    num_nodes: int, num_heads: int, num_key_heads: int, head_size: int, out: int, scale: float, scratch: int,
) -> None:  # fmt: skip
    """Rotate heads [N, H + 2 K, d] in bfloat16, append their keys and values to the slots [T, K d], and attend."""
    shift = 2 * slot_stride * (num_prefix + num_appended - num_nodes)
    _rotate_append(
        to_halves(heads), to_halves(cos), to_halves(sin), to_halves(keys + shift), to_halves(values + shift), slot_stride,
        num_nodes, num_heads, num_key_heads, head_size,
    )  # fmt: skip
    width = (num_heads + 2 * num_key_heads) * head_size
    _attend(
        to_halves(heads), width, head_size, to_halves(keys), to_halves(values), slot_stride, num_prefix, num_appended,
        to_bytes(mask), num_nodes, num_heads, num_key_heads, head_size, to_halves(out), scale, scratch,
    )  # fmt: skip
