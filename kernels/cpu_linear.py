"""Linears of a few bfloat16 rows on a CPU with AVX512-BF16, compiled by Numba.

oneDNN reads the weights and then multiplies; here the next weights are fetched while a row after the other is multiplied, so up
to 14 rows cost little more than one. More rows are multiplied in passes over a panel, each of which fetches its part of the
next panel: fetching all of it in the first pass leaves memory idle in the others (16 rows of SmolLM2: 12.2 ms
instead of 10.0).
Shapes: N rows, K input width, O output width.

Weights are stored in panels [O / 32, K / 2, 2, 16, 2]: for a pair of inputs, the weights of 32 outputs. Products of pairs are
added in float32 in the order of the inputs, and the sums of chunks of inputs afterwards. With the chunks of oneDNN the result
has its bits, which the caller checks (`cpu_kernels.find_chunk`).
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import carray, types

from .cpu_vectors import (
    WIDE,
    WORD,
    VectorBuilder,
    advance,
    compile_cached,
    emit_cases,
    emit_fetch,
    intrinsic,
    narrow,
    to_floats,
    to_halves,
)

COLUMNS = 32  # outputs of a panel
MAX_TILE_ROWS = 14  # whose sums fit in the registers, two vectors each
FETCH_AHEAD = 12 * 1024  # bytes that a single pass fetches ahead: 6 KB is too late for 12 rows, 36 KB too early for 8
PAIRS = ir.VectorType(WORD, 16)
SUMS = ir.VectorType(ir.FloatType(), 16)
LINE = 64  # bytes of a vector

# The inline assembly below needs it.
llvmlite.binding.initialize_native_asmparser()


@intrinsic
def multiply_rows(
    context: Any, rows: Any, x: Any, x_stride: Any, panel: Any, pairs: Any, sums: Any, adds: Any, fetched: Any, fetch_step: Any
) -> Any:
    """Multiply 1 to 14 rows with a chunk of a panel, by code of their own for each number of rows.

    Arguments: the number of rows, their address and the bytes between them, the address of the panel's chunk, its number of
    pairs, the address of float32 sums [rows, 32], whether the products are added to these sums or replace them, the address
    from which two lines are fetched with the first pair, and the bytes by which it grows with every pair.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        num_rows, *operands = args
        emit_cases(builder, num_rows, MAX_TILE_ROWS, lambda number: _emit_tile(builder, number, *operands))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, types.boolean, types.int64, types.int64), generate


def add_products(builder: Any, multiply_add: Any, operands: tuple[Any, Any, Any], index: Any, totals: list[Any]) -> list[Any]:
    """Add the products of word number `index` of every row, of 4 bytes, with two vectors of weights to two totals per row.

    Operands: the address of the rows and the bytes between them, and the address of the panel. The word stands in all lanes.
    """
    x, x_stride, panel = operands
    undefined, zeros = ir.Constant(PAIRS, ir.Undefined), ir.Constant(PAIRS, [0] * 16)

    def load(address: Any, kind: Any) -> Any:
        return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)

    start = builder.add(panel, builder.mul(index, WIDE(2 * LINE)))
    weights = [load(builder.add(start, WIDE(LINE * half)), PAIRS) for half in range(2)]
    first, after = builder.add(x, builder.mul(index, WIDE(4))), []
    for row in range(len(totals) // 2):
        word = load(builder.add(first, builder.mul(x_stride, WIDE(row))), WORD)
        repeated = builder.shuffle_vector(builder.insert_element(undefined, word, WORD(0)), undefined, zeros)
        after += [builder.call(multiply_add, [totals[2 * row + half], repeated, weights[half]]) for half in range(2)]
    return after


def _emit_tile(
    builder: Any, num_rows: int, x: Any, x_stride: Any, panel: Any, pairs: Any, sums: Any, adds: Any, fetched: Any, step: Any
) -> None:
    multiply_add = ir.InlineAsm(
        ir.FunctionType(SUMS, [SUMS, PAIRS, PAIRS]), "vdpbf16ps $3, $2, $0", "=v,0,v,v", side_effect=False
    )

    def add_pair(index: Any, totals: list[Any]) -> list[Any]:
        lines = builder.add(fetched, builder.mul(index, step))
        for half in range(2):
            emit_fetch(builder, builder.add(lines, WIDE(LINE * half)), 3)
        return add_products(builder, multiply_add, (x, x_stride, panel), index, totals)

    initial = [ir.Constant(SUMS, [0.0] * 16)] * (2 * num_rows)
    # The sums of this chunk, after those of the chunks before it.
    for number, total in enumerate(VectorBuilder(builder).loop(pairs, initial, add_pair)):
        pointer = builder.inttoptr(builder.add(sums, WIDE(LINE * number)), SUMS.as_pointer())
        earlier = builder.load(pointer, align=4)
        builder.store(builder.select(adds, builder.fadd(earlier, total), total), pointer, align=4)


@compile_cached
def multiply_panels(x: int, panels: int, out: int, rows: int, width: int, num_outputs: int, chunk: int, scratch: int) -> None:
    """Store x [N, K] times the weights in `panels`, [N, O], all bfloat16; `scratch` holds [14, 32] float32."""
    passes = (rows + MAX_TILE_ROWS - 1) // MAX_TILE_ROWS
    most = (rows + passes - 1) // passes
    # Of two passes or more, each of the first two fetches one half of the next panel.
    fetch_step = 2 * LINE if passes == 1 else LINE
    ahead = FETCH_AHEAD if passes == 1 else 2 * COLUMNS * width
    sums = to_floats(scratch)
    for first in range(0, num_outputs, COLUMNS):
        fetched = panels + 2 * first * width + ahead
        for row in range(0, rows, most):
            count = min(most, rows - row)
            for begin in range(0, width, chunk):
                pairs = min(chunk, width - begin) // 2
                panel = panels + 2 * (first * width + COLUMNS * begin)
                multiply_rows(
                    count, x + 2 * (row * width + begin), 2 * width, panel, pairs, scratch, begin > 0, fetched, fetch_step
                )
                fetched += fetch_step * pairs
            for r in range(count):
                values = carray(advance(sums, r * COLUMNS), (COLUMNS,))
                result = carray(to_halves(out + 2 * ((row + r) * num_outputs + first)), (COLUMNS,))
                for i in range(COLUMNS):
                    result[i] = narrow(values[i], result[i])
