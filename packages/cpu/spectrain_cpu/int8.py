"""Products of a few float32 rows with 8-bit weights on a CPU with AVX512-VNNI, compiled by Numba.

They compute what FBGEMM's dynamic linears compute: inputs are rounded to 8 bits with one scale and
one zero point for all rows, products are added as integers, and the sums are scaled. A product
takes the time in which its weights are read. Shapes: N rows, K input width, O output width.

Weights are stored in panels [O / 32, K / 4, 2, 16, 4]: for four inputs, the weights of 32 outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from torch import nn

from .huge_pages import LINE, copy_to_lines
from .linear import add_products, divide_panels
from .team import job_floats, job_numbers, run_job
from .vectors import (
    WIDE,
    WORDS,
    VectorBuilder,
    advance,
    compile_inline,
    compile_part,
    compile_reduction,
    emit_cases,
    emit_fetch,
    intrinsic,
    to_bytes,
    to_floats,
    to_words,
)

COLUMNS = 32  # outputs of a panel
MAX_TILE_ROWS = 12  # whose sums fit in the registers, two vectors each
FETCH_AHEAD = 16 * 1024  # bytes that many rows fetch ahead
# Rows that leave fetching to the processor: up to 4 read a third faster so (EPYC, pages of 2 MB, 33
# GB/s of one row instead of 24), and 8 a tenth slower.
MAX_UNFETCHED_ROWS = 4
LARGEST_BYTE = 255
SUMS_BYTES = 4 * MAX_TILE_ROWS * COLUMNS  # of a thread
SCALE_INDEX = 12  # of the job's numbers: the scale of the rows, as float32
INPUT_STEP = 4
"""Divisors of a linear's output and input width."""


class ByteLinear(NamedTuple):
    """The addresses of a linear's weights in panels, of their scales [O] in float32 and sums [O]
    in int32, and its sizes.
    """

    panels: int
    scales: int
    sums: int
    width: int
    num_outputs: int


@intrinsic
def multiply_bytes(
    context: Any, rows: Any, x: Any, x_stride: Any, panel: Any, quads: Any, sums: Any
) -> Any:
    """Multiply 1 to 12 rows of unsigned bytes with a panel, by code of their own for each number of
    rows.

    Arguments: the number of rows, their address and the bytes between them, the address of the
    panel, its number of four inputs, and the address of int32 sums [rows, 32].
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        num_rows, *operands = args
        emit_cases(
            builder, num_rows, MAX_TILE_ROWS, lambda number: _emit_tile(builder, number, *operands)
        )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


def _emit_tile(
    builder: Any, num_rows: int, x: Any, x_stride: Any, panel: Any, quads: Any, sums: Any
) -> None:
    vectors = VectorBuilder(builder)
    product = ir.InlineAsm(
        ir.FunctionType(WORDS, [WORDS] * 3), "vpdpbusd $3, $2, $0", "=v,0,v,v", side_effect=False
    )

    def multiply_add(fours: Any, weights: Any, total: Any) -> Any:
        return builder.call(product, [total, fours, weights])

    def add_quad(index: Any, totals: list[Any]) -> list[Any]:
        ahead = builder.add(
            panel, builder.add(builder.mul(index, WIDE(2 * LINE)), WIDE(FETCH_AHEAD))
        )
        for half in range(2 if num_rows > MAX_UNFETCHED_ROWS else 0):
            emit_fetch(builder, builder.add(ahead, WIDE(LINE * half)), 2)
        return add_products(vectors, multiply_add, (x, x_stride, panel), index, totals)

    zeros = ir.Constant(WORDS, [0] * 16)
    for number, total in enumerate(vectors.loop(quads, [zeros] * (2 * num_rows), add_quad)):
        vectors.store(total, vectors.offset(sums, WIDE(number), LINE))


@compile_reduction
def find_range(x: Any, count: int) -> Any:
    """Return the smallest and the largest of float32 numbers and 0."""
    numbers = carray(x, (count,))
    low = np.float32(0)
    high = np.float32(0)
    for i in range(count):
        low = min(low, numbers[i])
        high = max(high, numbers[i])
    return low, high


@compile_inline
def choose_scale(low: float, high: float) -> Any:
    """Return the scale and the zero point by which numbers between `low` and `high`, and 0, are
    rounded to 8 bits.
    """
    scale = np.float32((float(high) - float(low)) / LARGEST_BYTE)
    if scale == np.float32(0) or np.isinf(np.float32(1) / scale):
        scale = np.float32(0.1)
    below = float(low) / float(scale)
    above = float(high) / float(scale)
    zero = -below if abs(below) < LARGEST_BYTE + abs(above) else LARGEST_BYTE - above
    return scale, int(min(max(np.rint(zero), 0.0), float(LARGEST_BYTE)))


@compile_inline
def round_to_bytes(x: Any, count: int, scale: float, zero: int, out: Any) -> None:
    """Store numbers x as bytes: x / scale + zero."""
    numbers = carray(x, (count,))
    rounded = carray(out, (count,))
    factor = np.float32(1) / np.float32(scale)
    offset = np.float32(zero)
    for i in range(count):
        value = np.rint(numbers[i] * factor) + offset
        rounded[i] = np.uint8(np.int32(min(max(value, np.float32(0)), np.float32(LARGEST_BYTE))))


class TeamProduct(NamedTuple):
    """How products are shared: the working memory, the team of `team`, and how many of its
    threads multiply.
    """

    function: int  # the address of `multiply_bytes_part`
    rounded: int  # bytes [N, K]
    sums: int  # int32 [members, 12, 32]
    team: int
    members: int


@compile_part
def multiply_bytes_part(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of the job, as so many-th thread of the team."""
    job = job_numbers(team)
    scale = job_floats(team)[2 * SCALE_INDEX]
    rounded = job[1]
    panels = job[2]
    out = job[5]
    rows = job[6]
    width = job[7]
    num_outputs = job[8]
    zero = job[11]
    scratch = job[9] + member * SUMS_BYTES
    end = min((part + 1) * job[10], num_outputs // COLUMNS)
    parts = (rows + MAX_TILE_ROWS - 1) // MAX_TILE_ROWS
    most = (rows + parts - 1) // parts
    for first in range(part * job[10] * COLUMNS, end * COLUMNS, COLUMNS):
        scales = carray(advance(to_floats(job[3]), first), (COLUMNS,))
        offsets = carray(advance(to_words(job[4]), first), (COLUMNS,))
        for row in range(0, rows, most):
            count = min(most, rows - row)
            multiply_bytes(
                count, rounded + row * width, width, panels + first * width, width // 4, scratch
            )
            for r in range(count):
                sums = carray(advance(to_words(scratch), r * COLUMNS), (COLUMNS,))
                result = carray(
                    advance(to_floats(out), (row + r) * num_outputs + first), (COLUMNS,)
                )
                for i in range(COLUMNS):
                    result[i] = np.float32(sums[i] - np.int32(zero) * offsets[i]) * (
                        scale * scales[i]
                    )


@compile_inline
def multiply_rounded(x: int, rows: int, linear: ByteLinear, out: int, shared: TeamProduct) -> None:
    """Store float32 rows x [N, K] times the weights of a linear, [N, O]. The threads of the team
    share the panels.
    """
    width = linear.width
    count = linear.num_outputs // COLUMNS
    low, high = find_range(to_floats(x), rows * width)
    scale, zero = choose_scale(low, high)
    round_to_bytes(to_floats(x), rows * width, scale, zero, to_bytes(shared.rounded))
    members, step = divide_panels(count, shared.members)
    job = job_numbers(shared.team)
    job[0], job[1], job[2], job[3], job[4] = (
        shared.function,
        shared.rounded,
        linear.panels,
        linear.scales,
        linear.sums,
    )
    job[5], job[6], job[7], job[8], job[9], job[10], job[11] = (
        out,
        rows,
        width,
        linear.num_outputs,
        shared.sums,
        step,
        zero,
    )
    job_floats(shared.team)[2 * SCALE_INDEX] = scale
    run_job(shared.team, members, (count + step - 1) // step)


class ByteWeights:
    """The 8-bit weights [O, D] of an FBGEMM linear in panels, for rows of float32."""

    def __init__(self, packed: Any) -> None:
        weight, _ = torch.ops.quantized.linear_unpack(packed)
        numbers, (outputs, width) = weight.int_repr(), weight.shape
        blocks = numbers.view(outputs // COLUMNS, 2, COLUMNS // 2, width // INPUT_STEP, INPUT_STEP)
        self.panels = copy_to_lines(blocks.permute(0, 3, 1, 2, 4))
        self.scales = weight.q_per_channel_scales().float()
        self.sums = numbers.sum(1, dtype=torch.int32)
        self.sizes = width, outputs

    @staticmethod
    def supports(linear: nn.Linear) -> bool:
        """Return whether the weights of a linear can be stored in panels."""
        return linear.out_features % COLUMNS == linear.in_features % INPUT_STEP == 0

    @property
    def linear(self) -> Any:
        """Return the addresses and sizes, for kernels."""
        return ByteLinear(
            self.panels.data_ptr(), self.scales.data_ptr(), self.sums.data_ptr(), *self.sizes
        )
