"""Kernels over the rows of a layer on a CPU, compiled by Numba: norms with the sum before them, and gates, in bfloat16.

Shapes: N rows, D width, I inner width. Tensors are passed by address. Every number has the bits of torch's own operations,
which the caller checks once (`cpu_kernels.norm_lanes`): a norm sums its squares in the order of torch's vectors, and an
activation is looked up among the 65,536 that torch computed for every bfloat16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from .cpu_vectors import advance, compile_cached, compile_inline, narrow, to_floats, to_halves, widen

VECTORS = 4  # vectors that torch adds to at the same time
ROWS_PER_LEVEL = 16  # of these, after which it adds them to a second set of sums


@compile_inline
def _sum_squares(x: Any, width: int, lanes: int, sums: Any) -> Any:
    """Sum the squares of x [D] in float32 as torch sums a row with vectors of `lanes` numbers; `sums` is working memory."""
    step = VECTORS * lanes
    rows, count = width // step, width // lanes
    first, second = carray(sums, (step,)), carray(advance(sums, step), (step,))
    first[:] = np.float32(0)
    second[:] = np.float32(0)
    for row in range(rows):
        part = carray(advance(x, row * step), (step,))
        for i in range(step):
            first[i] += part[i] * part[i]
        if row % ROWS_PER_LEVEL == ROWS_PER_LEVEL - 1:
            for i in range(step):
                second[i] += first[i]
                first[i] = np.float32(0)
    for i in range(step):
        first[i] += second[i]
    for vector in range(rows * VECTORS, count):
        part = carray(advance(x, vector * lanes), (lanes,))
        for i in range(lanes):
            first[i] += part[i] * part[i]
    for vector in range(1, VECTORS):
        for i in range(lanes):
            first[i] += first[vector * lanes + i]
    total = np.float32(0)
    rest = carray(x, (width,))
    for i in range(count * lanes, width):
        total += rest[i] * rest[i]
    for i in range(lanes):
        total += first[i]
    return total


@compile_cached
def mean_squares(x: int, width: int, lanes: int, scratch: int) -> Any:
    """Return the mean of the squares of float32 numbers x [D]."""
    return _sum_squares(to_floats(x), width, lanes, to_floats(scratch)) / np.float32(width)


@compile_cached
def add_norm(
    hidden: int, added: int, weight: int, summed: int, normed: int, rows: int, width: int, eps: float, lanes: int, scratch: int
) -> None:
    """Store hidden + added [N, D] in `summed` and its RMS norm times the weight [D] in `normed`. Without `added`, which is then
    0, only the norm is stored. All are bfloat16; `scratch` holds D + 256 float32."""
    numbers, w = carray(to_floats(scratch), (width,)), carray(to_halves(weight), (width,))
    for row in range(rows):
        shift = 2 * row * width
        x, y = carray(to_halves(hidden + shift), (width,)), carray(to_halves(normed + shift), (width,))
        if added != 0:
            other, total = carray(to_halves(added + shift), (width,)), carray(to_halves(summed + shift), (width,))
            for i in range(width):
                total[i] = narrow(widen(x[i]) + widen(other[i]), x[i])
            x = total
        for i in range(width):
            numbers[i] = widen(x[i])
        mean = _sum_squares(to_floats(scratch), width, lanes, to_floats(scratch + 4 * width)) / np.float32(width)
        factor = np.float32(1) / np.sqrt(mean + np.float32(eps))
        for i in range(width):
            y[i] = narrow(widen(narrow(numbers[i] * factor, y[i])) * widen(w[i]), y[i])


@compile_cached
def gate(inner: int, activations: int, out: int, rows: int, width: int, copies: int) -> None:
    """Store activation(a) * b [N, I] of rows (a, b) [N, 2 I] once or, after each other, `copies` times, in bfloat16;
    `activations` are those of all bfloat16."""
    table = carray(to_halves(activations), (1 << 16,))
    for row in range(rows):
        a, b = carray(to_halves(inner + 4 * row * width), (width,)), carray(to_halves(inner + (4 * row + 2) * width), (width,))
        y = carray(to_halves(out + 2 * row * width), (width,))
        for i in range(width):
            y[i] = narrow(widen(table[a[i]]) * widen(b[i]), y[i])
    values = carray(to_halves(out), (copies * rows * width,))
    for i in range(rows * width, copies * rows * width):
        values[i] = values[i - rows * width]
