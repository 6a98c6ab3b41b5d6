"""Attention of the queries that share a key-value head on a CPU, compiled by Numba.

Shapes: N nodes, M appended ones, H query heads, K key-value heads, G = H / K, d head size, T key
slots, P = N G queries that share a key-value head, padded to a multiple of 16. A word of 32 bits is
a float32 or a pair of bfloat16.

Keys and values are read as they are stored, and sums are float32 in a fixed order: scores in the
order of d, weights and weighted values in the order of T. A key that a node does not see adds 0.
There are two ways with the same bits. With many queries a lane of a vector belongs to a query, and
scores are [T, P]. With few it belongs to a key, and scores are [P, T]: one token of SmolLM2 has
three queries a head, for which 13 of 16 lanes would be empty.
"""

from __future__ import annotations

from typing import Any

from numba import carray

from .attention_tiles import (
    exp_columns,
    exp_row,
    fetch_lines,
    make_score_product,
    make_transposed_product,
    make_value_sum,
    make_weight_sum,
)
from .vectors import (
    LANES,
    advance,
    as_words,
    compile_inline,
    count_words,
    narrow,
    to_floats,
    to_longs,
    to_words,
)

HIDDEN_SCORE = -1e30
# keys whose scores with up to two, or three, vectors of queries are summed in registers
KEY_TILE = 12
SHORT_KEY_TILE = 8
# queries whose sums of 64 numbers lie in registers
ROW_TILE = 6
SHORT_ROW_TILE = 3
AHEAD = 2 * LANES  # slots that are fetched before they are scored
FEW_ROWS = 8  # queries of a key-value head up to which a lane belongs to a key instead of a query

score_12x1 = make_score_product(12, 1)
score_12x2 = make_score_product(12, 2)
score_8x3 = make_score_product(8, 3)
score_1x1 = make_score_product(1, 1)
score_1x2 = make_score_product(1, 2)
score_1x3 = make_score_product(1, 3)
sum_6x4 = make_value_sum(6, 4)
sum_3x4 = make_value_sum(3, 4)
sum_1x4 = make_value_sum(1, 4)
sum_6x1 = make_value_sum(6, 1)
sum_1x1 = make_value_sum(1, 1)
score_few_3 = make_transposed_product(3)
score_few_1 = make_transposed_product(1)
add_weights_3 = make_weight_sum(3)
add_weights_1 = make_weight_sum(1)


@compile_inline
def _score_tile(
    keys: Any,
    slot_stride: int,
    rows: int,
    queries: int,
    row_bytes: int,
    scores: int,
    words: int,
    scale: Any,
    vectors: int,
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
    keys: Any,
    slot_stride: int,
    length: int,
    queries: int,
    padded: int,
    scores: int,
    words: int,
    scale: Any,
) -> None:
    """Store the scores [T, P] of keys with the queries [words, P]. The last tile begins early
    rather than end late.
    """
    row_bytes = 4 * padded
    left = padded // LANES
    shift = 0
    while left > 0:
        vectors = 2 if left == 4 else min(left, 3)
        tile = SHORT_KEY_TILE if vectors == 3 else KEY_TILE
        rows = tile if length >= tile else 1
        for first in range(0, length, rows):
            start = min(first, length - rows)
            _score_tile(
                advance(keys, start * slot_stride),
                slot_stride,
                rows,
                queries + shift,
                row_bytes,
                scores + shift + start * row_bytes,
                words,
                scale,
                vectors,
            )
        left -= vectors
        shift += 4 * LANES * vectors


@compile_inline
def _sum_rows(
    values: Any,
    slot_stride: int,
    weights: int,
    weight_bytes: int,
    row_bytes: int,
    sums: int,
    sum_bytes: int,
    length: int,
    rows: int,
    width: int,
) -> None:
    """Sum one, three or six rows of values, 64 or 16 numbers of each."""
    if width == 4:
        if rows == ROW_TILE:
            sum_6x4(values, slot_stride, weights, weight_bytes, row_bytes, sums, sum_bytes, length)
        elif rows == SHORT_ROW_TILE:
            sum_3x4(values, slot_stride, weights, weight_bytes, row_bytes, sums, sum_bytes, length)
        else:
            sum_1x4(values, slot_stride, weights, weight_bytes, row_bytes, sums, sum_bytes, length)
    elif rows == ROW_TILE:
        sum_6x1(values, slot_stride, weights, weight_bytes, row_bytes, sums, sum_bytes, length)
    else:
        sum_1x1(values, slot_stride, weights, weight_bytes, row_bytes, sums, sum_bytes, length)


@compile_inline
def _sum_values(
    values: Any,
    slot_stride: int,
    length: int,
    weights: int,
    weight_bytes: int,
    row_bytes: int,
    sums: int,
    num_rows: int,
    head_size: int,
) -> None:
    """Store the values [T, d] weighted by weights with these bytes between slots and rows,
    summed, [rows, d].
    """
    left = head_size // LANES
    shift = 0
    while left > 0:
        width = 4 if left >= 4 else 1
        row = 0
        while row < num_rows:
            rest = num_rows - row
            # Rows that are few more than a tile of three take one of six, which begins early.
            rows = (
                ROW_TILE
                if rest >= ROW_TILE or (rest > SHORT_ROW_TILE and num_rows >= ROW_TILE)
                else SHORT_ROW_TILE
            )
            if rows > num_rows or (width == 1 and rows == SHORT_ROW_TILE):
                rows = 1
            start = min(row, num_rows - rows)
            _sum_rows(
                advance(values, shift),
                slot_stride,
                weights + start * row_bytes,
                weight_bytes,
                row_bytes,
                sums + 4 * (start * head_size + shift),
                4 * head_size,
                length,
                rows,
                width,
            )
            row = start + rows
        left -= width
        shift += width * LANES


@compile_inline
def _hide_slots(
    scores: Any,
    slot_step: int,
    row_step: int,
    mask: Any,
    num_prefix: int,
    num_appended: int,
    num_nodes: int,
    group: int,
    hidden: int,
) -> None:
    """Lower the scores, so many numbers apart by slot and by row, of the appended nodes that a node
    does not see by `mask` [N, M], and of the first `hidden` [N] slots; it is 0 where every node
    sees all of these."""
    if hidden != 0:
        counts = carray(to_longs(hidden), (num_nodes,))
        for n in range(num_nodes):
            for t in range(counts[n]):
                for g in range(group):
                    scores[t * slot_step + (n * group + g) * row_step] = HIDDEN_SCORE
    for m in range(num_appended):
        for n in range(num_nodes):
            if not mask[n * num_appended + m]:
                for g in range(group):
                    scores[(num_prefix + m) * slot_step + (n * group + g) * row_step] = HIDDEN_SCORE


@compile_inline
def _divide_rows(
    sums: int,
    totals: int,
    num_rows: int,
    group: int,
    head_size: int,
    out: Any,
    out_start: int,
    out_stride: int,
) -> None:
    """Store sums of weighted values [rows, d] over the sums of their weights [rows], in the type
    of the model.
    """
    all_totals = carray(to_floats(totals), (num_rows,))
    for r in range(num_rows):
        result = carray(
            advance(out, r // group * out_stride + out_start + r % group * head_size), (head_size,)
        )
        numbers = carray(to_floats(sums + 4 * r * head_size), (head_size,))
        for d in range(head_size):
            result[d] = narrow(numbers[d] / all_totals[r], result[d])


@compile_inline
def _score_few(
    keys: Any,
    values: Any,
    slot_stride: int,
    length: int,
    queries: int,
    num_rows: int,
    scores: int,
    row_bytes: int,
    words: int,
    scale: Any,
    fetched: int,
) -> None:
    """Store the scores [rows, T] of at least 16 keys with a few queries [rows, words]. Tiles begin
    early rather than end late. So many numbers of each slot, of all heads, are fetched ahead."""
    row = 0
    while row < num_rows:
        rows = 3 if num_rows >= 3 else 1
        first = min(row, num_rows - rows)
        for early in range(0, length, LANES):
            slot = min(early, length - LANES)
            if row == 0 and fetched > 0:
                for near in range(slot, slot + LANES):
                    fetch_lines(advance(keys, min(near + AHEAD, length - 1) * slot_stride), fetched)
                    fetch_lines(advance(values, near * slot_stride), fetched)
            tile = advance(keys, slot * slot_stride)
            query = queries + 4 * first * words
            output = scores + first * row_bytes + 4 * slot
            if rows == 3:
                score_few_3(tile, slot_stride, query, output, row_bytes, words, scale)
            else:
                score_few_1(tile, slot_stride, query, output, row_bytes, words, scale)
        row = first + rows


@compile_inline
def _sum_few(weights: int, row_bytes: int, length: int, num_rows: int, totals: int) -> None:
    """Store the sums of a few rows of weights [rows, T]."""
    rows = 3 if num_rows >= 3 else 1
    for row in range(0, num_rows, rows):
        first = min(row, num_rows - rows)
        if rows == 3:
            add_weights_3(weights + first * row_bytes, row_bytes, length, totals + 4 * first)
        else:
            add_weights_1(weights + first * row_bytes, row_bytes, length, totals + 4 * first)


@compile_inline
def _store_queries(
    queries: Any,
    node_stride: int,
    head_stride: int,
    head: int,
    group: int,
    num_rows: int,
    words: int,
    stored: Any,
    row_step: int,
    word_step: int,
) -> None:
    """Store the queries of one key-value head, with so many words between rows and between
    words.
    """
    for r in range(num_rows):
        query = advance(
            queries, r // group * node_stride + (head * group + r % group) * head_stride
        )
        q = carray(as_words(query), (words,))
        for i in range(words):
            stored[i * word_step + r * row_step] = q[i]


@compile_inline
def attend_head(
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
    scale: Any,
    scratch: int,
    hidden: int,
    head: int,
) -> None:
    """Attend with the queries of one key-value head, of queries [N, H, d] of these strides, to the
    slots [T, K d] of a text, into [N, H d]."""
    group = num_heads // num_key_heads
    words = count_words(queries, head_size)
    num_rows = num_nodes * group
    length = num_prefix + num_appended
    head_keys = advance(keys, head * head_size)
    head_values = advance(values, head * head_size)
    is_few = num_rows <= FEW_ROWS and words % LANES == 0 and length >= LANES
    # Scratch holds the queries, the scores that become weights, the sums of weights, and the sums
    # of weighted values.
    columns = num_rows if is_few else (num_rows + LANES - 1) // LANES * LANES
    slots = (length + LANES - 1) // LANES * LANES if is_few else length
    slot_step, row_step = (1, slots) if is_few else (columns, 1)
    scores = scratch + 4 * words * columns
    totals = scores + 4 * columns * slots
    sums = totals + 4 * columns
    stored = carray(to_words(scratch), (words * columns,))
    all_scores = carray(to_floats(scores), (columns * slots,))
    # 1. Scores, [P, T] of a few queries and else [T, P]. What fills the last vector is hidden, or
    #    the scores of zeros.
    if is_few:
        fetched = num_key_heads * head_size if head == 0 else 0
        _store_queries(
            queries, node_stride, head_stride, head, group, num_rows, words, stored, words, 1
        )
        _score_few(
            head_keys,
            head_values,
            slot_stride,
            length,
            scratch,
            num_rows,
            scores,
            4 * slots,
            words,
            scale,
            fetched,
        )
        for r in range(num_rows):
            for t in range(length, slots):
                all_scores[r * slots + t] = HIDDEN_SCORE
    else:
        stored[:] = 0
        _store_queries(
            queries, node_stride, head_stride, head, group, num_rows, words, stored, 1, columns
        )
        _score_keys(head_keys, slot_stride, length, scratch, columns, scores, words, scale)
    _hide_slots(
        all_scores, slot_step, row_step, mask, num_prefix, num_appended, num_nodes, group, hidden
    )
    # 2. Weights, in place, and their sums.
    if is_few:
        for r in range(num_rows):
            exp_row(scores + 4 * r * slots, slots // LANES)
        _sum_few(scores, 4 * slots, length, num_rows, totals)
    else:
        for j in range(columns // LANES):
            exp_columns(scores + 4 * j * LANES, 4 * columns, length, totals + 4 * j * LANES)
    # 3. Weighted values.
    _sum_values(
        head_values,
        slot_stride,
        length,
        scores,
        4 * slot_step,
        4 * row_step,
        sums,
        num_rows,
        head_size,
    )
    _divide_rows(
        sums,
        totals,
        num_rows,
        group,
        head_size,
        out,
        head * group * head_size,
        num_heads * head_size,
    )
