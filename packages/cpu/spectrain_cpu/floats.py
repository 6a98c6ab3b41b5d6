"""Kernels over rows of float32 numbers on a CPU, compiled by Numba, for drafting: what lies between
the linears of a drafter and after them. Sums may be made in any order, because a drafter's last
bits decide nothing.

Shapes: N rows, D width, I inner width, V vocabulary, K children. Tensors are passed by address.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types

from .vectors import WORD, advance, compile_inline, compile_reduction, intrinsic

LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4
LOWEST = -87.0  # exp of less is not a normal float32

BLOCK = 64  # numbers whose largest is compared with the best ones


@intrinsic
def scale_by_power(context: Any, value: Any, exponent: Any) -> Any:
    """Return a float32 times 2^exponent, for an int32 exponent that gives a normal number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], WORD)
        return builder.bitcast(builder.add(bits, builder.shl(args[1], WORD(23))), ir.FloatType())

    return types.float32(types.float32, types.int32), generate


@compile_inline
def exp_float(x: Any) -> Any:
    """Return e^x of a float32 up to 0: 2^n e^r with r = x - n ln(2), by the Taylor series."""
    x = max(x, np.float32(LOWEST))
    n = np.rint(x * np.float32(1 / math.log(2)))
    r = x - n * np.float32(LN2_HIGH) - n * np.float32(LN2_LOW)
    series = np.float32(1 / 5040)
    series = series * r + np.float32(1 / 720)
    series = series * r + np.float32(1 / 120)
    series = series * r + np.float32(1 / 24)
    series = series * r + np.float32(1 / 6)
    series = series * r + np.float32(1 / 2)
    series = series * r + np.float32(1)
    series = series * r + np.float32(1)
    return scale_by_power(series, np.int32(n))


@compile_reduction
def _sum_squares(x: Any, width: int) -> Any:
    numbers = carray(x, (width,))
    total = np.float32(0)
    for i in range(width):
        total += numbers[i] * numbers[i]
    return total


@compile_inline
def norm_row(x: Any, weight: Any, out: Any, width: int, eps: float) -> None:
    """Store the RMS norm of a float32 row [D] times a weight [D]."""
    numbers = carray(x, (width,))
    scales = carray(weight, (width,))
    result = carray(out, (width,))
    factor = np.float32(1) / np.sqrt(_sum_squares(x, width) / np.float32(width) + np.float32(eps))
    for i in range(width):
        result[i] = numbers[i] * factor * scales[i]


@compile_inline
def gate_rows(inner: Any, out: Any, rows: int, width: int) -> None:
    """Store silu(a) * b [N, I] of rows (a, b) [N, 2 I]."""
    for row in range(rows):
        a = carray(advance(inner, 2 * row * width), (width,))
        b = carray(advance(inner, (2 * row + 1) * width), (width,))
        result = carray(advance(out, row * width), (width,))
        for i in range(width):
            weight = exp_float(-abs(a[i]))
            share = np.float32(1) / (np.float32(1) + weight)
            result[i] = a[i] * (share if a[i] >= 0 else weight * share) * b[i]


@compile_reduction
def find_largest(x: Any, width: int) -> Any:
    numbers = carray(x, (width,))
    largest = numbers[0]
    for i in range(1, width):
        largest = max(largest, numbers[i])
    return largest


@compile_reduction
def _sum_exps(x: Any, width: int, largest: float) -> Any:
    numbers = carray(x, (width,))
    total = np.float32(0)
    for i in range(width):
        total += exp_float(numbers[i] - largest)
    return total


@compile_inline
def normalize_row(logits: Any, width: int) -> None:
    """Replace logits [V] by their log-probabilities."""
    numbers = carray(logits, (width,))
    largest = find_largest(logits, width)
    log_sum = largest + np.log(_sum_exps(logits, width, largest))
    for i in range(width):
        numbers[i] -= log_sum


@compile_inline
def _insert(value: float, index: int, values: Any, indices: Any, count: int) -> None:
    """Insert a number into `count` numbers in descending order, after equal ones; the last one
    drops out.
    """
    slot = count - 1
    while slot > 0 and value > values[slot - 1]:
        values[slot], indices[slot] = values[slot - 1], indices[slot - 1]
        slot -= 1
    values[slot], indices[slot] = value, index


@compile_inline
def select_best(x: Any, width: int, count: int, out_values: Any, out_indices: Any) -> None:
    """Store the `count` largest numbers of x [V] in descending order, the first of equal ones
    first, and their indices.
    """
    numbers = carray(x, (width,))
    values = carray(out_values, (count,))
    indices = carray(out_indices, (count,))
    for i in range(count):
        values[i], indices[i] = numbers[i], i
        _insert(numbers[i], i, values, indices, i + 1)
    for first in range(count, width, BLOCK):
        size = min(BLOCK, width - first)
        if find_largest(advance(x, first), size) > values[count - 1]:
            for i in range(first, first + size):
                if numbers[i] > values[count - 1]:
                    _insert(numbers[i], i, values, indices, count)
