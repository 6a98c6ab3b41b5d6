"""Kernels over the rows of a layer on a CPU, compiled by Numba: norms with the sum before them,
norms of heads, and gates.

Shapes: N rows, D width, I inner width, H query heads, K key-value heads, d head size. Tensors are
passed by address. Every norm, and every number in bfloat16, has the bits of torch's own operations,
which the caller checks once (`norm_lanes`): a norm sums its squares in the order of
torch's vectors, and an activation is looked up among the 65,536 that torch computed for every
bfloat16. In float32 it is computed to the last bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray, types
from torch import Tensor

from .available import working_memory
from .vectors import (
    LANES,
    VECTOR_BYTES,
    VectorBuilder,
    advance,
    compile_cached,
    compile_inline,
    intrinsic,
    narrow,
    to_floats,
    to_halves,
    widen,
)

VECTORS = 4  # vectors that torch adds to at the same time
ROWS_PER_LEVEL = 16  # of these, after which it adds them to a second set of sums
LANE_COUNTS = (8, 16, 4)
"""Numbers in the vectors of float32 that torch may sum with."""
PROBE_ROWS = 64


@compile_inline
def _sum_squares(x: Any, width: int, lanes: int, sums: Any) -> Any:
    """Sum the squares of x [D] in float32 as torch sums a row with vectors of `lanes` numbers;
    `sums` is working memory.
    """
    step = VECTORS * lanes
    rows = width // step
    count = width // lanes
    first = carray(sums, (step,))
    second = carray(advance(sums, step), (step,))
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


@compile_inline
def _norm_row(
    x: Any, weight: Any, out: Any, width: int, eps: float, lanes: int, scratch: int
) -> None:
    """Store the RMS norm of x [D] times the weight [D]; `out` may be x."""
    numbers = carray(to_floats(scratch), (width,))
    w = carray(weight, (width,))
    source = carray(x, (width,))
    result = carray(out, (width,))
    for i in range(width):
        numbers[i] = widen(source[i])
    mean = _sum_squares(
        to_floats(scratch), width, lanes, to_floats(scratch + 4 * width)
    ) / np.float32(width)
    factor = np.float32(1) / np.sqrt(mean + np.float32(eps))
    for i in range(width):
        result[i] = narrow(widen(narrow(numbers[i] * factor, result[i])) * widen(w[i]), result[i])


@compile_inline
def _add_norm(
    hidden: Any,
    added: Any,
    adds: bool,
    weight: Any,
    summed: Any,
    normed: Any,
    rows: int,
    width: int,
    eps: float,
    lanes: int,
    scratch: int,
) -> None:
    for row in range(rows):
        shift = row * width
        x = advance(hidden, shift)
        if adds:
            first = carray(x, (width,))
            second = carray(advance(added, shift), (width,))
            x = advance(summed, shift)
            total = carray(x, (width,))
            for i in range(width):
                total[i] = narrow(widen(first[i]) + widen(second[i]), first[i])
        _norm_row(x, weight, advance(normed, shift), width, eps, lanes, scratch)


@compile_cached
def add_norm_half(
    hidden: int,
    added: int,
    weight: int,
    summed: int,
    normed: int,
    rows: int,
    width: int,
    eps: float,
    lanes: int,
    scratch: int,
) -> None:
    """Store hidden + added [N, D] in `summed` and its RMS norm times the weight [D] in `normed`.
    Without `added`, which is then 0, only the norm is stored. All are bfloat16; `scratch` holds D +
    256 float32."""
    _add_norm(
        to_halves(hidden),
        to_halves(added),
        added != 0,
        to_halves(weight),
        to_halves(summed),
        to_halves(normed),
        rows,
        width,
        eps,
        lanes,
        scratch,
    )


@compile_cached
def add_norm_float(
    hidden: int,
    added: int,
    weight: int,
    summed: int,
    normed: int,
    rows: int,
    width: int,
    eps: float,
    lanes: int,
    scratch: int,
) -> None:
    """Compute the same in float32."""
    _add_norm(
        to_floats(hidden),
        to_floats(added),
        added != 0,
        to_floats(weight),
        to_floats(summed),
        to_floats(normed),
        rows,
        width,
        eps,
        lanes,
        scratch,
    )


@compile_inline
def _norm_heads(
    heads: Any,
    query_weight: Any,
    key_weight: Any,
    rows: int,
    num_heads: int,
    num_key_heads: int,
    size: int,
    eps: float,
    lanes: int,
    scratch: int,
) -> None:
    for row in range(rows):
        first = row * (num_heads + 2 * num_key_heads)
        for head in range(num_heads + num_key_heads):
            x = advance(heads, (first + head) * size)
            _norm_row(
                x, query_weight if head < num_heads else key_weight, x, size, eps, lanes, scratch
            )


@compile_cached
def norm_heads_half(
    heads: int,
    query_weight: int,
    key_weight: int,
    rows: int,
    num_heads: int,
    num_key_heads: int,
    size: int,
    eps: float,
    lanes: int,
    scratch: int,
) -> None:
    """Replace the queries and keys of heads [N, H + 2 K, d] in bfloat16 by their RMS norms times
    weights [d].
    """
    _norm_heads(
        to_halves(heads),
        to_halves(query_weight),
        to_halves(key_weight),
        rows,
        num_heads,
        num_key_heads,
        size,
        eps,
        lanes,
        scratch,
    )


@compile_cached
def norm_heads_float(
    heads: int,
    query_weight: int,
    key_weight: int,
    rows: int,
    num_heads: int,
    num_key_heads: int,
    size: int,
    eps: float,
    lanes: int,
    scratch: int,
) -> None:
    """Compute the same in float32."""
    _norm_heads(
        to_floats(heads),
        to_floats(query_weight),
        to_floats(key_weight),
        rows,
        num_heads,
        num_key_heads,
        size,
        eps,
        lanes,
        scratch,
    )


@compile_cached
def gate_half(inner: int, activations: int, out: int, rows: int, width: int, copies: int) -> None:
    """Store activation(a) * b [N, I] of rows (a, b) [N, 2 I] once or, after each other, `copies`
    times, in bfloat16; `activations` are those of all bfloat16."""
    table = carray(to_halves(activations), (1 << 16,))
    for row in range(rows):
        a = carray(to_halves(inner + 4 * row * width), (width,))
        b = carray(to_halves(inner + (4 * row + 2) * width), (width,))
        y = carray(to_halves(out + 2 * row * width), (width,))
        # The lookups by themselves leave products that are computed in vectors.
        for i in range(width):
            y[i] = table[a[i]]
        for i in range(width):
            y[i] = narrow(widen(y[i]) * widen(b[i]), y[i])
    values = carray(to_halves(out), (copies * rows * width,))
    for i in range(rows * width, copies * rows * width):
        values[i] = values[i - rows * width]


@intrinsic
def gate_vectors(context: Any, inputs: Any, factors: Any, out: Any, count: Any) -> Any:
    """Store silu(a) * b of `count` vectors of 16 float32, given by their addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        inputs, factors, out, count = args
        vectors = VectorBuilder(builder)
        one = vectors.constant(1.0)

        def gate(index: Any, values: list[Any]) -> list[Any]:
            a, b = (
                vectors.load(vectors.offset(base, index, VECTOR_BYTES))
                for base in (inputs, factors)
            )
            is_positive = builder.fcmp_ordered(">", a, vectors.constant(0.0))
            # The sigmoid by powers of numbers up to 0.
            power = vectors.exp(builder.select(is_positive, builder.fneg(a), a))
            share = builder.fdiv(builder.select(is_positive, one, power), builder.fadd(one, power))
            vectors.store(
                builder.fmul(builder.fmul(a, share), b), vectors.offset(out, index, VECTOR_BYTES)
            )
            return []

        vectors.loop(count, [], gate)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@compile_cached
def gate_float(inner: int, out: int, rows: int, width: int) -> None:
    """Store silu(a) * b [N, I] of rows (a, b) [N, 2 I] in float32, where 16 divides I."""
    for row in range(rows):
        start = inner + 8 * row * width
        gate_vectors(start, start + 4 * width, out + 4 * row * width, width // LANES)


@cache
def norm_lanes() -> int | None:
    """Return the numbers per vector with which torch sums a row of float32 here, or None where
    no count gives its bits.
    """
    source = torch.Generator().manual_seed(0)
    for lanes in LANE_COUNTS:
        if all(
            _sums_as_torch(torch.randn(PROBE_ROWS, width, generator=source), lanes)
            for width in (576, 1000, 2048)
        ):
            return lanes
    return None


def _sums_as_torch(x: Tensor, lanes: int) -> bool:
    """Return whether the kernel's mean squares of x [N, D] have the bits of torch's."""
    width = x.shape[1]
    memory = working_memory(1 << 12).data_ptr()
    means = [mean_squares(row.data_ptr(), width, lanes, memory) for row in x]
    return torch.tensor(means).equal(x.pow(2).mean(-1))


@cache
def silu_table() -> Tensor:
    """Return torch's SiLU of every bfloat16, [65536], by its bits."""
    with torch.inference_mode():
        return F.silu(
            torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
        )


class RowKernels(NamedTuple):
    """The kernels for numbers of one type. Each is compiled, or loaded, at its first call."""

    add_norm: Any
    norm_heads: Any
    gate: Any


def select_rows(dtype: torch.dtype) -> RowKernels:
    """Return the kernels for tensors of this type."""
    if dtype == torch.bfloat16:
        return RowKernels(add_norm_half, norm_heads_half, gate_half)
    return RowKernels(add_norm_float, norm_heads_float, gate_float)


def prepare_rows(dtype: torch.dtype) -> None:
    """Load the kernels of a type, or compile them where this machine has not."""
    kernels = select_rows(dtype)
    lanes = norm_lanes() or LANE_COUNTS[0]
    memory = working_memory(1 << 12).data_ptr()
    x = torch.zeros(1, 3, 1, LANES, dtype=dtype)
    result = torch.zeros_like(x)
    first = x.data_ptr()
    out = result.data_ptr()
    kernels.add_norm(first, 0, first, 0, out, 1, LANES, 1.0, lanes, memory)
    kernels.norm_heads(out, first, first, 1, 1, 1, LANES, 1.0, lanes, memory)
    if dtype == torch.bfloat16:
        kernels.gate(first, silu_table().data_ptr(), out, 1, LANES, 1)
    else:
        kernels.gate(first, out, 1, LANES)
