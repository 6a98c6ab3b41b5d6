"""Linears of a few bfloat16 rows on a CPU with AVX512-BF16, compiled by Numba.

oneDNN reads the weights and then multiplies; here the next weights are fetched while a row after the other is multiplied, so up
to a dozen rows cost little more than one. Shapes: N rows, K input width, O output width.

Weights are stored in panels [O / 32, K / 2, 2, 16, 2]: for a pair of inputs, the weights of 32 outputs. Products of pairs are
added in float32 in the order of the inputs, and the sums of chunks of inputs afterwards. With the chunks of oneDNN the result
has its bits, which the caller checks (`cpu_kernels.find_chunk`).
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils

from .cpu_vectors import WIDE, WORD, advance, compile_cached, compile_inline, intrinsic, narrow, to_floats, to_halves

COLUMNS = 32  # outputs of a panel
MAX_TILE_ROWS = 12  # whose sums fit in the registers, two vectors each
FETCH_AHEAD = 36 * 1024  # bytes; about a panel of 576 inputs
PAIRS = ir.VectorType(WORD, 16)
SUMS = ir.VectorType(ir.FloatType(), 16)
LINE = 64  # bytes of a vector

# The inline assembly below needs it.
llvmlite.binding.initialize_native_asmparser()


def make_tile(num_rows: int) -> Any:
    """Return a function that multiplies rows with a chunk of a panel.

    Arguments: the addresses of the rows and the bytes between them, of the panel's chunk, the number of pairs in the chunk, the
    address of float32 sums [rows, 32], and whether the products are added to these sums or replace them.
    """

    @intrinsic
    def multiply(context: Any, x: Any, x_stride: Any, panel: Any, pairs: Any, sums: Any, adds: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _emit_tile(builder, num_rows, *args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5, types.boolean), generate

    return multiply


def _emit_tile(builder: Any, num_rows: int, x: Any, x_stride: Any, panel: Any, pairs: Any, sums: Any, adds: Any) -> None:
    multiply_add = ir.InlineAsm(
        ir.FunctionType(SUMS, [SUMS, PAIRS, PAIRS]), "vdpbf16ps $3, $2, $0", "=v,0,v,v", side_effect=False
    )
    byte_pointer = ir.IntType(8).as_pointer()
    fetch_type = ir.FunctionType(ir.VoidType(), [byte_pointer, WORD, WORD, WORD])
    fetch = cgutils.get_or_insert_function(builder.module, fetch_type, "llvm.prefetch.p0")
    undefined, zeros = ir.Constant(PAIRS, ir.Undefined), ir.Constant(PAIRS, [0] * 16)
    rows, halves = range(num_rows), range(2)

    def load(address: Any, kind: Any) -> Any:
        return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)

    # 1. The loop over pairs of inputs: two vectors of weights, and a pair of every row in all lanes.
    before, body, done = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(body)
    builder.position_at_end(body)
    index = builder.phi(WIDE)
    totals = [builder.phi(SUMS) for _ in rows for _ in halves]
    start = builder.add(panel, builder.mul(index, WIDE(2 * LINE)))
    weights = [load(builder.add(start, WIDE(LINE * half)), PAIRS) for half in halves]
    for half in halves:
        ahead = builder.inttoptr(builder.add(start, WIDE(FETCH_AHEAD + LINE * half)), byte_pointer)
        builder.call(fetch, [ahead, WORD(0), WORD(2), WORD(1)])
    first, after = builder.add(x, builder.mul(index, WIDE(4))), []
    for row in rows:
        pair = load(builder.add(first, builder.mul(x_stride, WIDE(row))), WORD)
        repeated = builder.shuffle_vector(builder.insert_element(undefined, pair, WORD(0)), undefined, zeros)
        after += [builder.call(multiply_add, [totals[2 * row + half], repeated, weights[half]]) for half in halves]
    following = builder.add(index, WIDE(1))
    for phi, initial, last in zip(
        [index, *totals], [WIDE(0), *[ir.Constant(SUMS, [0.0] * 16)] * len(totals)], [following, *after]
    ):
        phi.add_incoming(initial, before)
        phi.add_incoming(last, body)
    builder.cbranch(builder.icmp_signed("<", following, pairs), body, done)
    # 2. The sums of this chunk, after those of the chunks before it.
    builder.position_at_end(done)
    for number, total in enumerate(after):
        pointer = builder.inttoptr(builder.add(sums, WIDE(LINE * number)), SUMS.as_pointer())
        earlier = builder.load(pointer, align=4)
        builder.store(builder.select(adds, builder.fadd(earlier, total), total), pointer, align=4)


tiles = tile_1, tile_2, tile_3, tile_4, tile_5, tile_6, tile_7, tile_8, tile_9, tile_10, tile_11, tile_12 = tuple(
    make_tile(rows) for rows in range(1, MAX_TILE_ROWS + 1)
)


@compile_inline
def _multiply_rows(rows: int, x: int, x_stride: int, panel: int, pairs: int, sums: int, adds: bool) -> None:
    """Multiply 1 to 12 rows with a chunk of a panel."""
    if rows == 1:
        tile_1(x, x_stride, panel, pairs, sums, adds)
    elif rows == 2:
        tile_2(x, x_stride, panel, pairs, sums, adds)
    elif rows == 3:
        tile_3(x, x_stride, panel, pairs, sums, adds)
    elif rows == 4:
        tile_4(x, x_stride, panel, pairs, sums, adds)
    elif rows == 5:
        tile_5(x, x_stride, panel, pairs, sums, adds)
    elif rows == 6:
        tile_6(x, x_stride, panel, pairs, sums, adds)
    elif rows == 7:
        tile_7(x, x_stride, panel, pairs, sums, adds)
    elif rows == 8:
        tile_8(x, x_stride, panel, pairs, sums, adds)
    elif rows == 9:
        tile_9(x, x_stride, panel, pairs, sums, adds)
    elif rows == 10:
        tile_10(x, x_stride, panel, pairs, sums, adds)
    elif rows == 11:
        tile_11(x, x_stride, panel, pairs, sums, adds)
    else:
        tile_12(x, x_stride, panel, pairs, sums, adds)


@compile_cached
def multiply_panels(x: int, panels: int, out: int, rows: int, width: int, num_outputs: int, chunk: int, scratch: int) -> None:
    """Store x [N, K] times the weights in `panels`, [N, O], all bfloat16; `scratch` holds [12, 32] float32."""
    parts = (rows + MAX_TILE_ROWS - 1) // MAX_TILE_ROWS
    most = (rows + parts - 1) // parts
    sums = to_floats(scratch)
    for first in range(0, num_outputs, COLUMNS):
        for row in range(0, rows, most):
            count = min(most, rows - row)
            for begin in range(0, width, chunk):
                pairs = min(chunk, width - begin) // 2
                panel = panels + 2 * (first * width + COLUMNS * begin)
                _multiply_rows(count, x + 2 * (row * width + begin), 2 * width, panel, pairs, scratch, begin > 0)
            for r in range(count):
                values = carray(advance(sums, r * COLUMNS), (COLUMNS,))
                result = carray(to_halves(out + 2 * ((row + r) * num_outputs + first)), (COLUMNS,))
                for i in range(COLUMNS):
                    result[i] = narrow(values[i], result[i])
