"""Kernels of decoder layers on a CPU, compiled by Numba: attention, with what lies between two linears.

Shapes: B texts, N rows (tokens or tree nodes) of each, M appended nodes of each, H query heads, K key-value heads, G = H / K, d
head size, T key slots, P = N G queries that share a key-value head, padded to a multiple of 16. A word of 32 bits is a float32
or a pair of bfloat16.

Tensors are passed by address. Attention reads keys and values as they are stored and sums in float32, in a fixed order: scores
[T, P] in the order of d, weights and weighted values in the order of T. A key that a node does not see adds 0. So a node's
bits are those of the same token alone, whatever other nodes lie between its ancestors, and whatever other texts there are.

Numba keeps compiled code beside this file, or in the user's cache folder, until this file changes; save this file too after a
change of cpu_vectors.py or cpu_attention_tiles.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from .cpu_attention_tiles import exp_columns, make_score_product, make_value_sum
from .cpu_vectors import (
    LANES,
    advance,
    as_words,
    compile_cached,
    compile_inline,
    count_words,
    narrow,
    to_bytes,
    to_floats,
    to_halves,
    to_longs,
    to_words,
    widen,
)

HIDDEN_SCORE = -1e30
KEY_TILE, SHORT_KEY_TILE = 12, 8  # keys whose scores with up to two, or three, vectors of queries are summed in registers
ROW_TILE, SHORT_ROW_TILE = 6, 3  # queries whose sums of 64 numbers lie in registers

score_12x1, score_12x2, score_8x3 = make_score_product(12, 1), make_score_product(12, 2), make_score_product(8, 3)
score_1x1, score_1x2, score_1x3 = make_score_product(1, 1), make_score_product(1, 2), make_score_product(1, 3)
sum_6x4, sum_3x4, sum_1x4 = make_value_sum(6, 4), make_value_sum(3, 4), make_value_sum(1, 4)
sum_6x1, sum_1x1 = make_value_sum(6, 1), make_value_sum(1, 1)


@compile_inline
def _score_tile(
    keys: Any, slot_stride: int, rows: int, queries: int, row_bytes: int, scores: int, words: int, scale: Any, vectors: int
) -> None:
    """Score 1 key, or as many as a tile has, with one to three vectors of queries."""
    if vectors == 1:
        if rows == 1:
            score_1x1(keys, slot_stride, queries, row_bytes, scores, words, scale)
        else:
            score_12x1(keys, slot_stride, queries, row_bytes, scores, words, scale)
    elif vectors == 2:
        if rows == 1:
            score_1x2(keys, slot_stride, queries, row_bytes, scores, words, scale)
        else:
            score_12x2(keys, slot_stride, queries, row_bytes, scores, words, scale)
    elif rows == 1:
        score_1x3(keys, slot_stride, queries, row_bytes, scores, words, scale)
    else:
        score_8x3(keys, slot_stride, queries, row_bytes, scores, words, scale)


@compile_inline
def _score_keys(
    keys: Any, slot_stride: int, length: int, queries: int, padded: int, scores: int, words: int, scale: Any
) -> None:
    """Store the scores [T, P] of keys with the queries [words, P]. The last tile begins early rather than end late."""
    row_bytes, left, shift = 4 * padded, padded // LANES, 0
    while left > 0:
        vectors = 2 if left == 4 else min(left, 3)
        tile = SHORT_KEY_TILE if vectors == 3 else KEY_TILE
        rows = tile if length >= tile else 1
        for first in range(0, length, rows):
            start = min(first, length - rows)
            _score_tile(
                advance(keys, start * slot_stride), slot_stride, rows, queries + shift, row_bytes,
                scores + shift + start * row_bytes, words, scale, vectors,
            )  # fmt: skip
        left -= vectors
        shift += 4 * LANES * vectors


@compile_inline
def _sum_rows(
    values: Any,
    slot_stride: int,
    weights: int,
    weight_bytes: int,
    sums: int,
    sum_bytes: int,
    length: int,
    rows: int,
    width: int,
) -> None:
    """Sum one, three or six rows of values, 64 or 16 numbers of each."""
    if width == 4:
        if rows == ROW_TILE:
            sum_6x4(values, slot_stride, weights, weight_bytes, sums, sum_bytes, length)
        elif rows == SHORT_ROW_TILE:
            sum_3x4(values, slot_stride, weights, weight_bytes, sums, sum_bytes, length)
        else:
            sum_1x4(values, slot_stride, weights, weight_bytes, sums, sum_bytes, length)
    elif rows == ROW_TILE:
        sum_6x1(values, slot_stride, weights, weight_bytes, sums, sum_bytes, length)
    else:
        sum_1x1(values, slot_stride, weights, weight_bytes, sums, sum_bytes, length)


@compile_inline
def _sum_values(
    values: Any, slot_stride: int, length: int, weights: int, padded: int, sums: int, num_rows: int, head_size: int
) -> None:
    """Store the values [T, d] weighted by weights [T, P], summed, [rows, d]."""
    left, shift = head_size // LANES, 0
    while left > 0:
        width, row = 4 if left >= 4 else 1, 0
        while row < num_rows:
            rest = num_rows - row
            # Rows that are few more than a tile of three take one of six, which begins early.
            rows = ROW_TILE if rest >= ROW_TILE or (rest > SHORT_ROW_TILE and num_rows >= ROW_TILE) else SHORT_ROW_TILE
            if rows > num_rows or (width == 1 and rows == SHORT_ROW_TILE):
                rows = 1
            start = min(row, num_rows - rows)
            _sum_rows(
                advance(values, shift), slot_stride, weights + 4 * start, 4 * padded, sums + 4 * (start * head_size + shift),
                4 * head_size, length, rows, width,
            )  # fmt: skip
            row = start + rows
        left -= width
        shift += width * LANES


@compile_inline
def _hide_slots(
    scores: Any, mask: Any, num_prefix: int, num_appended: int, num_nodes: int, group: int, padded: int, hidden: int
) -> None:
    """Lower the scores [T, P] of the appended nodes that a node does not see by `mask` [N, M], and of the first `hidden` [N]
    slots; it is 0 where every node sees all of these."""
    if hidden != 0:
        counts = carray(to_longs(hidden), (num_nodes,))
        for n in range(num_nodes):
            for t in range(counts[n]):
                for g in range(group):
                    scores[t * padded + n * group + g] = HIDDEN_SCORE
    for m in range(num_appended):
        for n in range(num_nodes):
            if not mask[n * num_appended + m]:
                for g in range(group):
                    scores[(num_prefix + m) * padded + n * group + g] = HIDDEN_SCORE


@compile_inline
def _attend_head(
    keys: Any, values: Any, slot_stride: int, num_prefix: int, num_appended: int, mask: Any, num_nodes: int, group: int,
    head_size: int, words: int, out: Any, out_start: int, out_stride: int, scale: Any, scratch: int, hidden: int,
) -> None:  # fmt: skip
    """Attend with the queries of one key-value head, which lie first in `scratch`: transposed, [words, P]."""
    num_rows, length = num_nodes * group, num_prefix + num_appended
    padded = (num_rows + LANES - 1) // LANES * LANES
    # 1. Scores [T, P].
    scores = scratch + 4 * words * padded
    _score_keys(keys, slot_stride, length, scratch, padded, scores, words, scale)
    all_scores = carray(to_floats(scores), (length * padded,))
    _hide_slots(all_scores, mask, num_prefix, num_appended, num_nodes, group, padded, hidden)
    # 2. Weights, in place, and their sums [P].
    all_totals = scores + 4 * length * padded
    for j in range(padded // LANES):
        exp_columns(scores + 4 * j * LANES, 4 * padded, length, all_totals + 4 * j * LANES)
    # 3. Weighted values [P, d].
    all_sums, totals = all_totals + 4 * padded, carray(to_floats(all_totals), (padded,))
    _sum_values(values, slot_stride, length, scores, padded, all_sums, num_rows, head_size)
    for r in range(num_rows):
        result = carray(advance(out, r // group * out_stride + out_start + r % group * head_size), (head_size,))
        sums = carray(to_floats(all_sums + 4 * r * head_size), (head_size,))
        for d in range(head_size):
            result[d] = narrow(sums[d] / totals[r], result[d])


@compile_inline
def attend_text(
    queries: Any, node_stride: int, head_stride: int, keys: Any, values: Any, slot_stride: int, num_prefix: int,
    num_appended: int, mask: Any, num_nodes: int, num_heads: int, num_key_heads: int, head_size: int, out: Any, scale: float,
    scratch: int, hidden: int,
) -> None:  # fmt: skip
    """Attend with queries [N, H, d] of these strides to the slots [T, K d] of a text, into [N, H d]."""
    group, words = num_heads // num_key_heads, count_words(queries, head_size)
    padded = (num_nodes * group + LANES - 1) // LANES * LANES
    transposed = carray(to_words(scratch), (words * padded,))
    transposed[:] = 0
    for head in range(num_key_heads):
        for r in range(num_nodes * group):
            query = advance(queries, r // group * node_stride + (head * group + r % group) * head_stride)
            q = carray(as_words(query), (words,))
            for i in range(words):
                transposed[i * padded + r] = q[i]
        _attend_head(
            advance(keys, head * head_size), advance(values, head * head_size), slot_stride, num_prefix, num_appended, mask,
            num_nodes, group, head_size, words, out, head * group * head_size, num_heads * head_size, np.float32(scale),
            scratch, hidden,
        )  # fmt: skip


@compile_inline
def rotate_append(
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


@compile_inline
def _attend_texts(
    queries: Any, node_stride: int, head_stride: int, cos: Any, sin: Any, rotates: bool, keys: Any, values: Any,
    slot_stride: int, starts: int, lengths: int, num_texts: int, num_appended: int, masks: int, num_nodes: int, num_heads: int,
    num_key_heads: int, head_size: int, out: Any, scale: float, scratch: int, hidden: int,
) -> None:  # fmt: skip
    first_slots, num_committed = carray(to_longs(starts), (num_texts,)), carray(to_longs(lengths), (num_texts,))
    for text in range(num_texts):
        node, length = text * num_nodes, num_committed[text]
        shift = slot_stride * first_slots[text]
        heads = advance(queries, node * node_stride)
        if rotates:
            new = shift + slot_stride * (length + num_appended - num_nodes)
            rotate_append(
                heads, advance(cos, node * head_size), advance(sin, node * head_size), advance(keys, new), advance(values, new),
                slot_stride, num_nodes, num_heads, num_key_heads, head_size,
            )  # fmt: skip
        attend_text(
            heads, node_stride, head_stride, advance(keys, shift), advance(values, shift), slot_stride, length, num_appended,
            to_bytes(masks + node * num_appended), num_nodes, num_heads, num_key_heads, head_size,
            advance(out, node * num_heads * head_size), scale, scratch, 0 if hidden == 0 else hidden + 8 * node,
        )  # fmt: skip


@compile_cached
def attend_texts_half(
    queries: int, node_stride: int, head_stride: int, cos: int, sin: int, keys: int, values: int, slot_stride: int, starts: int,
    lengths: int, num_texts: int, num_appended: int, masks: int, num_nodes: int, num_heads: int, num_key_heads: int,
    head_size: int, out: int, scale: float, scratch: int, hidden: int,
) -> None:  # fmt: skip
    """Attend in bfloat16 with queries [B, N, H, d] of these strides to the slots of each text, into [B, N, H d], by masks
    [B, N, M].

    The slots of a text begin with number `starts` [B] of all slots [.., K d], and `lengths` [B] of them are committed. Of
    these, each node does not see the first `hidden` [B, N], unless that is 0. Unless `cos` is 0, the queries are heads
    [B, N, H + 2 K, d], which are rotated first, and whose keys and values are appended to the slots.
    """
    _attend_texts(
        to_halves(queries), node_stride, head_stride, to_halves(cos), to_halves(sin), cos != 0, to_halves(keys),
        to_halves(values), slot_stride, starts, lengths, num_texts, num_appended, masks, num_nodes, num_heads, num_key_heads,
        head_size, to_halves(out), scale, scratch, hidden,
    )  # fmt: skip


@compile_cached
def attend_texts_float(
    queries: int, node_stride: int, head_stride: int, cos: int, sin: int, keys: int, values: int, slot_stride: int, starts: int,
    lengths: int, num_texts: int, num_appended: int, masks: int, num_nodes: int, num_heads: int, num_key_heads: int,
    head_size: int, out: int, scale: float, scratch: int, hidden: int,
) -> None:  # fmt: skip
    """Compute the same in float32."""
    _attend_texts(
        to_floats(queries), node_stride, head_stride, to_floats(cos), to_floats(sin), cos != 0, to_floats(keys),
        to_floats(values), slot_stride, starts, lengths, num_texts, num_appended, masks, num_nodes, num_heads, num_key_heads,
        head_size, to_floats(out), scale, scratch, hidden,
    )  # fmt: skip
