"""Causal attention of bfloat16 texts on a CPU with AVX512-BF16, compiled by Numba: probabilities,
and gradients of scores.

Shapes: H query heads, K key-value heads, T tokens, S = T up to a multiple of 32, d head size.
Scores exist for the rows of a tile. oneDNN multiplies the probabilities and the gradients of the
scores, [H, T, S] in bfloat16, with values, keys and queries. Torch's own kernel takes three times
as long: it multiplies small blocks in float32.

Keys and values are in panels [K, S / 32, d / 2, 2, 16, 2], as the weights of `cpu_linear` are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from .cpu_linear import COLUMNS, MAX_TILE_ROWS, multiply_rows
from .cpu_losses import exp_negative
from .cpu_vectors import advance, compile_cached, compile_inline, narrow, to_floats, to_halves

TILE = COLUMNS * MAX_TILE_ROWS  # float32 numbers of a block of scores
ZERO = np.float32(0)
HIDDEN = np.float32(-1e30)  # score of a key that a token does not see


@compile_inline
def _multiply_tile(
    rows: int, count: int, head_size: int, panels: int, blocks: int, sums: int
) -> None:
    """Store the products of `count` rows [.., d] with blocks of 32 keys, [blocks, count, 32]."""
    for block in range(blocks):
        panel = panels + 2 * block * COLUMNS * head_size
        multiply_rows(
            to_halves(rows),
            count,
            rows,
            2 * head_size,
            panel,
            head_size // 2,
            sums + 4 * block * TILE,
            False,
            panel,
            0,
        )


@compile_inline
def _hide_later(scores: Any, row: int) -> None:
    """Hide the keys after a row in the block of its own key."""
    block = carray(scores, (COLUMNS,))
    for i in range(row % COLUMNS + 1, COLUMNS):
        block[i] = HIDDEN


@compile_inline
def _normalise(scores: Any, blocks: int, scale: Any) -> Any:
    """Replace the scores of a row, in blocks, by e^(scale (score - largest)); return the largest
    and the sum.
    """
    tops = np.full(COLUMNS, HIDDEN)
    totals = np.zeros(COLUMNS, np.float32)
    for block in range(blocks):
        part = carray(advance(scores, block * TILE), (COLUMNS,))
        for i in range(COLUMNS):
            tops[i] = part[i] if part[i] > tops[i] else tops[i]
    largest = tops.max()
    for block in range(blocks):
        part = carray(advance(scores, block * TILE), (COLUMNS,))
        for i in range(COLUMNS):
            part[i] = exp_negative((part[i] - largest) * scale)
            totals[i] += part[i]
    return largest, totals.sum()


@compile_cached
def causal_probabilities(
    queries: int,
    key_panels: int,
    probabilities: int,
    lse: int,
    heads: int,
    groups: int,
    length: int,
    head_size: int,
    scale: float,
    scratch: int,
) -> None:
    """Store the probabilities [H, T, S] and the log-sum-exps [H, T] of queries [H, T, d]; `scratch`
    holds the blocks of a tile."""
    factor = np.float32(scale)
    width = (length + COLUMNS - 1) // COLUMNS * COLUMNS
    for head in range(heads):
        panels = key_panels + head // groups * 2 * width * head_size
        for first in range(0, length, MAX_TILE_ROWS):
            count = min(MAX_TILE_ROWS, length - first)
            blocks = (first + count + COLUMNS - 1) // COLUMNS
            start = head * length + first
            _multiply_tile(
                queries + 2 * start * head_size, count, head_size, panels, blocks, scratch
            )
            for row in range(first, first + count):
                scores = advance(to_floats(scratch), (row - first) * COLUMNS)
                visible = row // COLUMNS + 1
                _hide_later(advance(scores, (visible - 1) * TILE), row)
                largest, total = _normalise(scores, visible, factor)
                carray(to_floats(lse), (heads * length,))[head * length + row] = (
                    np.log(total) + largest * factor
                )
                share = np.float32(1) / total
                out = carray(to_halves(probabilities + 2 * (head * length + row) * width), (width,))
                for block in range(visible):
                    part = carray(advance(scores, block * TILE), (COLUMNS,))
                    for i in range(COLUMNS):
                        out[block * COLUMNS + i] = narrow(part[i] * share, out[0])
                out[visible * COLUMNS :] = 0


@compile_cached
def causal_score_gradients(
    queries: int,
    key_panels: int,
    gradients: int,
    value_panels: int,
    dots: int,
    lse: int,
    probabilities: int,
    score_gradients: int,
    heads: int,
    groups: int,
    length: int,
    head_size: int,
    scale: float,
    scratch: int,
) -> None:
    """Store the probabilities and the gradients of the scores [H, T, S] from those of the outputs
    [H, T, d], their products with the outputs, `dots` [H, T], and the log-sum-exps; `scratch` holds
    the blocks of two tiles."""
    factor = np.float32(scale)
    width = (length + COLUMNS - 1) // COLUMNS * COLUMNS
    other = scratch + 4 * width // COLUMNS * TILE
    all_lse = carray(to_floats(lse), (heads * length,))
    all_dots = carray(to_floats(dots), (heads * length,))
    for head in range(heads):
        offset = head // groups * 2 * width * head_size
        for first in range(0, length, MAX_TILE_ROWS):
            count = min(MAX_TILE_ROWS, length - first)
            blocks = (first + count + COLUMNS - 1) // COLUMNS
            start = 2 * (head * length + first) * head_size
            _multiply_tile(queries + start, count, head_size, key_panels + offset, blocks, scratch)
            _multiply_tile(
                gradients + start, count, head_size, value_panels + offset, blocks, other
            )
            for row in range(first, first + count):
                index = head * length + row
                shift = all_lse[index]
                dot = all_dots[index]
                p = carray(to_halves(probabilities + 2 * index * width), (width,))
                g = carray(to_halves(score_gradients + 2 * index * width), (width,))
                visible = row // COLUMNS + 1
                _hide_later(
                    advance(to_floats(scratch), (row - first) * COLUMNS + (visible - 1) * TILE), row
                )
                for block in range(visible):
                    begin = block * TILE + (row - first) * COLUMNS
                    scores = carray(advance(to_floats(scratch), begin), (COLUMNS,))
                    grads = carray(advance(to_floats(other), begin), (COLUMNS,))
                    for i in range(COLUMNS):
                        score = scores[i] * factor - shift
                        probability = exp_negative(score if score < ZERO else ZERO)
                        p[block * COLUMNS + i] = narrow(probability, p[0])
                        g[block * COLUMNS + i] = narrow(
                            probability * (grads[i] - dot) * factor, g[0]
                        )
                p[visible * COLUMNS :] = 0
                g[visible * COLUMNS :] = 0
