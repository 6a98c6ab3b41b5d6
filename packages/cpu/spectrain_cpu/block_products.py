"""Products of rows with quantised weights of GGUF files on a CPU, compiled by Numba: the integers
are multiplied as they lie in memory, and never written in a wider type.

Rows are rounded to 16 bits: 32 inputs share a scale, which is a power of two, so numbers of
bfloat16 down to 1/128 of the largest of their 32 are exact. The products of a block are added as
integers, in any order the same, and then scaled by the block's scale in float32; what the minima
add is the sum of the inputs times the minimum. So a result depends neither on the other rows nor on
the number of threads, and differs from that of float32 weights by the rounding of the rows.

Where that was asked for, rows are rounded to 8 bits instead, as llama.cpp's are: 32 inputs share a
scale, the largest of them over 127, and an instruction adds 64 products. That takes VNNI.

A block is read and its integers are taken apart once for all rows of a tile. With AVX-512 an
instruction adds 32 products (VNNI); elsewhere the same sums take two instructions, or four with
AVX2. On an EPYC (Zen 4) the pairs of bfloat16 would take as many instructions, and their weights
more work to take apart.

Shapes: N rows, K input width, O output width, B blocks of 32 inputs. `block_formats` says how
weights lie in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import gguf
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from torch import Tensor

from .available import has_block_kernels
from .block_formats import BLOCK, COLUMNS, FORMATS, VECTORS, BlockFormat, pack_panels, unpack_panels
from .linear import LINE, divide_panels
from .team import MAX_MEMBERS, current_team, job_numbers, run_job
from .vectors import (
    FLOAT,
    LANES,
    VECTOR,
    WIDE,
    WORD,
    WORDS,
    VectorBuilder,
    advance,
    compile_cached,
    compile_inline,
    compile_part,
    emit_cases,
    emit_fetch,
    intrinsic,
    narrow,
    to_floats,
    to_halves,
    to_longs,
    widen,
)

# Rows whose sums fit in the registers, of which AVX-512 has 32 and AVX2 has 16 of half the size.
MAX_TILE_ROWS = 8 if torch.cpu._is_avx512_supported() else 2
# Bytes that are fetched ahead, into the second-level cache: rows fill the first. A single row of
# Q4_K reads its weights 1.3 times as fast as with 8 KB into the first (EPYC, a busy machine).
FETCH_AHEAD = 32 * 1024
# A rounded block of a row: 32 integers of 16 or 8 bits, then in float32 their scale, their sum, and
# the sums of their halves.
RECORD_BYTES = 2 * BLOCK + 16
BYTE_RECORD_BYTES = BLOCK + 16
SUMS_BYTES = 4 * MAX_TILE_ROWS * COLUMNS  # of a thread
# Rows are rounded to integers below 2^15, or up to 127.
MANTISSA_SHIFT = 14
LARGEST_BYTE = 127
BYTE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The order of eight inputs in a record of bytes: as masks take them out of a line."""
LEAST_EXPONENT = 32  # of rows that are no zeros, with the bias of float32
SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)
HALF_FLOATS = ir.VectorType(ir.HalfType(), LANES)
BYTES = ir.VectorType(ir.IntType(8), LANES)
HALF_WORDS = ir.VectorType(WORD, LANES // 2)

# numbers of a segment: its part function, its panels, their number and bytes, its first output
SEGMENT_SIZE = 5


@cache
def has_fused_words() -> bool:
    """Return whether the processor multiplies and adds pairs of 16 bits in one instruction."""
    return bool(torch.cpu._is_avx512_supported() and torch.cpu._is_vnni_supported())


@cache
def has_wide_words() -> bool:
    """Return whether the processor multiplies 32 integers of 16 bits in one instruction."""
    return bool(torch.cpu._is_avx512_supported())


class BlockTile:
    """Emits the products of some rows, rounded to 16 bits, with a panel of 16 outputs."""

    record_bytes = RECORD_BYTES
    # Instructions that multiply a block by a row.
    num_steps = VECTORS

    def __init__(
        self, builder: Any, block_format: BlockFormat, num_rows: int, products: str
    ) -> None:
        self.builder = builder
        self.vectors = VectorBuilder(builder)
        self.format = block_format
        self.num_rows = num_rows
        self.products = products

    def multiply_panel(
        self, rows: Any, panel: Any, blocks: Any, fetched: Any, fetch_step: Any
    ) -> list[Any]:
        """Return the sums of the rows over all blocks, 16 outputs each.

        Arguments: the addresses of the rows' records and of the panel, its number of blocks, and
        the address from which memory is fetched with the first block, with the bytes by which it
        grows with every block.
        """
        builder = self.builder
        group_blocks = self.format.group_blocks
        groups = builder.udiv(blocks, WIDE(group_blocks))
        scales = builder.add(panel, builder.mul(blocks, WIDE(self.format.block_bytes)))

        def add_group(group: Any, totals: list[Any]) -> list[Any]:
            numbers = self.vectors.offset(scales, group, self.format.group_bytes)
            first = builder.mul(group, WIDE(group_blocks))
            scale = self._load_halves(numbers, 0)
            minimum = self._load_halves(numbers, 1) if self.format.has_minimum else None

            def add_block(index: Any, totals: list[Any]) -> list[Any]:
                block = builder.add(first, index)
                self._fetch(builder.add(fetched, builder.mul(block, fetch_step)))
                return self._add_block(
                    self.vectors.offset(rows, block, self.record_bytes * self.num_rows),
                    self.vectors.offset(panel, block, self.format.block_bytes),
                    self._part_scales(numbers, index, scale, minimum),
                    totals,
                )

            if group_blocks == 1:
                return add_block(WIDE(0), totals)
            return self.vectors.loop(WIDE(group_blocks), totals, add_block)

        return self.vectors.loop(groups, [self.vectors.constant(0.0)] * self.num_rows, add_group)

    def _fetch(self, address: Any) -> None:
        step = self.format.block_bytes + self.format.group_bytes // self.format.group_blocks
        for line in range(-(-step // LINE)):
            emit_fetch(self.builder, self.builder.add(address, WIDE(LINE * line)), 2)

    def _load_halves(self, numbers: Any, index: int) -> Any:
        """Return 16 float16 numbers of a group as float32."""
        address = self.builder.add(numbers, WIDE(2 * COLUMNS * index))
        return self.builder.fpext(self.vectors.load(address, HALF_FLOATS), VECTOR)

    def _part_scales(
        self, numbers: Any, index: Any, scale: Any, minimum: Any
    ) -> list[tuple[Any, Any]]:
        """Return the scale of each part of a block, and what is added for every unit of an
        input, or None."""
        builder = self.builder
        per_block = self.format.scale_parts // self.format.group_blocks
        if not per_block:
            return [(scale, self._add_offset(scale, minimum))]
        start = builder.add(numbers, WIDE(2 * COLUMNS * (1 if minimum is None else 2)))
        parts = []
        for part in range(per_block):
            number = builder.add(builder.mul(index, WIDE(per_block)), WIDE(part))
            address = self.vectors.offset(start, number, COLUMNS)
            part_scale = builder.fmul(scale, self._load_integers(address, minimum is None))
            if minimum is None:
                parts.append((part_scale, self._add_offset(part_scale, None)))
                continue
            address = builder.add(address, WIDE(COLUMNS * self.format.scale_parts))
            product = builder.fmul(minimum, self._load_integers(address, False))
            parts.append((part_scale, builder.fneg(product)))
        return parts

    def _add_offset(self, scale: Any, minimum: Any) -> Any:
        """Return the minimum of unsigned integers: that of the file, or that of the offset."""
        if minimum is not None or not self.offset:
            return minimum
        return self.builder.fmul(scale, self.vectors.constant(-float(self.offset)))

    @property
    def offset(self) -> int:
        """What is subtracted from every integer that is multiplied."""
        return self.format.offset

    def _load_integers(self, address: Any, is_signed: bool) -> Any:
        """Return 16 bytes as float32."""
        content = self.vectors.load(address, BYTES)
        extend = self.builder.sext if is_signed else self.builder.zext
        return self.builder.sitofp(extend(content, WORDS), VECTOR)

    def _add_block(
        self, rows: Any, block: Any, parts: list[tuple[Any, Any]], totals: list[Any]
    ) -> list[Any]:
        """Add the products of a block to the sums of the rows."""
        builder = self.builder
        count = self.num_steps // len(parts)
        scale_byte = self.record_bytes - 16
        # A few rows have two chains of sums, because each addition waits for the one before it.
        chains = 2 if self.num_rows < 3 else 1
        zeros = ir.Constant(WORDS, [0] * LANES)
        totals = list(totals)
        for number, (scale, minimum) in enumerate(parts):
            sums = [[zeros] * chains for _ in range(self.num_rows)]
            for index, weights in enumerate(self._iterate_steps(block, number * count, count)):
                for row in range(self.num_rows):
                    chain = index % chains
                    offset = self.record_bytes * row + 4 * (number * count + index)
                    sums[row][chain] = self._add_products(sums[row][chain], weights, rows, offset)
            for row in range(self.num_rows):
                record = builder.add(rows, WIDE(self.record_bytes * row))
                total = sums[row][0]
                for other in sums[row][1:]:
                    total = builder.add(total, other)
                factor = self.vectors.load_repeated(builder.add(record, WIDE(scale_byte)))
                totals[row] = self.vectors.multiply_add(
                    builder.sitofp(total, VECTOR), builder.fmul(scale, factor), totals[row]
                )
                if minimum is not None:
                    at = scale_byte + (4 if len(parts) == 1 else 8 + 4 * number)
                    inputs = self.vectors.load_repeated(builder.add(record, WIDE(at)))
                    totals[row] = self.vectors.multiply_add(minimum, inputs, totals[row])
        return totals

    def _iterate_steps(self, block: Any, first: int, count: int) -> Any:
        """Yield the integers of vectors of a block: two inputs of 16 outputs in 16 bits each."""
        builder = self.builder
        bits = self.format.high_bits
        high: Any = None
        lines: list[Any] = []
        for vector in range(first, first + count):
            four, in_high_byte, field = vector // 4, vector // 2 % 2, vector % 2
            if vector % 4 == 0:
                lines = self._load_lines(block, four)
            if bits and (vector * bits % 16 == 0 or high is None):
                high = self._load_high_line(block, vector * bits // 16)
            if self.format.low_bits == 8:
                line = lines[field]
                shifted = line if in_high_byte else builder.shl(line, self._shorts(8))
                words = builder.ashr(shifted, self._shorts(8))
            else:
                words = self._take_field(lines[0], 4 * (vector % 4), 4, 0)
            if bits:
                start = 8 * in_high_byte + self._high_start(four, field)
                words = builder.or_(words, self._take_field(high, start, bits, 4))
            yield builder.bitcast(words, WORDS)

    def _load_lines(self, block: Any, four: int) -> list[Any]:
        """Return the lines that hold the low bits of four vectors: one, or two of eight bits."""
        count = self.format.low_bits // 4
        return [self._load_line(block, LINE * (count * four + index)) for index in range(count)]

    def _load_high_line(self, block: Any, index: int) -> Any:
        return self._load_line(block, 2 * COLUMNS * BLOCK // 4 + LINE * index)

    def _high_start(self, four: int, field: int) -> int:
        """Return the first bit, in a byte, of the high bits of a field of four vectors."""
        bits = self.format.high_bits
        return bits * (2 * (four % (4 // bits)) + field)

    def _load_line(self, block: Any, start: int) -> Any:
        return self.vectors.load(self.builder.add(block, WIDE(start)), SHORTS)

    @staticmethod
    def _shorts(number: int) -> Any:
        return ir.Constant(SHORTS, [number] * (2 * LANES))

    def _take_field(self, line: Any, start: int, bits: int, target: int) -> Any:
        """Return the bits of every word from `start` on, moved to the bit `target`."""
        builder = self.builder
        line = self._move_bits(line, start, target)
        # The last bits of a word have none above them.
        is_last = start + bits == 16 and target == 0
        return line if is_last else builder.and_(line, self._shorts(((1 << bits) - 1) << target))

    def _move_bits(self, line: Any, start: int, target: int) -> Any:
        """Return words whose bit `start` is the bit `target`."""
        if start > target:
            return self.builder.lshr(line, self._shorts(start - target))
        return line if start == target else self.builder.shl(line, self._shorts(target - start))

    def _add_products(self, sums: Any, weights: Any, rows: Any, offset: int) -> Any:
        """Add to 16 sums the products of two inputs of every output with those of a row."""
        builder = self.builder
        if self.products == "fused":
            # The inputs are read by the instruction itself.
            kind = ir.FunctionType(WORDS, [WORDS, WORDS, WIDE])
            code = f"vpdpwssd {offset}($3){{1to16}}, $2, $0"
            return builder.call(
                ir.InlineAsm(kind, code, "=v,0,v,r", side_effect=False), [sums, weights, rows]
            )
        inputs = self.vectors.load_repeated(builder.add(rows, WIDE(offset)), WORD)
        if self.products == "wide":
            kind = ir.FunctionType(WORDS, [WORDS, WORDS])
            multiply = ir.InlineAsm(kind, "vpmaddwd $2, $1, $0", "=v,v,v", side_effect=False)
            return builder.add(sums, builder.call(multiply, [weights, inputs]))
        kind = ir.FunctionType(HALF_WORDS, [HALF_WORDS, HALF_WORDS])
        multiply = ir.InlineAsm(kind, "vpmaddwd $2, $1, $0", "=x,x,x", side_effect=False)
        halves = [
            builder.call(multiply, [self._half(weights, half), self._half(inputs, half)])
            for half in range(2)
        ]
        lanes = ir.Constant(WORDS, list(range(LANES)))
        return builder.add(sums, builder.shuffle_vector(*halves, lanes))

    def _half(self, words: Any, half: int) -> Any:
        size = LANES // 2
        lanes = ir.Constant(HALF_WORDS, [half * size + lane for lane in range(size)])
        return self.builder.shuffle_vector(words, words, lanes)


class ByteTile(BlockTile):
    """Emits the products of some rows, rounded to 8 bits, with a panel of 16 outputs."""

    record_bytes = BYTE_RECORD_BYTES
    num_steps = VECTORS // 2

    @property
    def offset(self) -> int:
        """What is subtracted from every integer that is multiplied: signed bytes are multiplied as
        unsigned ones.
        """
        return 128 if self.format.low_bits == 8 else self.format.offset

    def _iterate_steps(self, block: Any, first: int, count: int) -> Any:
        """Yield unsigned bytes of a block: four inputs of 16 outputs."""
        builder = self.builder
        bits = self.format.high_bits
        lines: list[Any] = []
        high: Any = None
        for step in range(first, first + count):
            four, field = step // 2, step % 2
            if field == 0:
                lines = self._load_lines(block, four)
            if self.format.low_bits == 8:
                integers = builder.xor(lines[field], self._shorts(0x8080))
            else:
                shifted = builder.lshr(lines[0], self._shorts(4)) if field else lines[0]
                integers = builder.and_(shifted, self._shorts(0x0F0F))
            if bits:
                if step * bits % 8 == 0 or high is None:
                    high = self._load_high_line(block, step * bits // 8)
                mask = ((1 << bits) - 1) << 4
                moved = self._move_bits(high, self._high_start(four, field), 4)
                moved = builder.and_(moved, self._shorts(mask << 8 | mask))
                integers = builder.or_(integers, moved)
            yield builder.bitcast(integers, WORDS)

    def _add_products(self, sums: Any, weights: Any, rows: Any, offset: int) -> Any:
        """Add to 16 sums the products of four inputs of every output with those of a row."""
        kind = ir.FunctionType(WORDS, [WORDS, WORDS, WIDE])
        code = f"vpdpbusd {offset}($3){{1to16}}, $2, $0"
        product = ir.InlineAsm(kind, code, "=v,0,v,r", side_effect=False)
        return self.builder.call(product, [sums, weights, rows])


def make_multiply(
    block_format: BlockFormat, products: str | None = None, most_rows: int = MAX_TILE_ROWS
) -> Any:
    """Return the function that multiplies 1 to `most_rows` rows with a panel, by code of its own
    for each number of rows.

    Its arguments: the number of rows, the address of their records [B, rows], the address of the
    panel, its number of blocks, the address of float32 sums [rows, 16], the address from which
    memory is fetched with the first block, and the bytes by which it grows with every block.
    `products` is "fused", "wide" or "narrow" by the instructions for rows in 16 bits, of which null
    takes the best ones here, or "bytes" for rows in 8 bits.
    """
    chosen = products or (
        "fused" if has_fused_words() else "wide" if has_wide_words() else "narrow"
    )

    def multiply(
        context: Any,
        num_rows: Any,
        rows: Any,
        panel: Any,
        blocks: Any,
        sums: Any,
        fetched: Any,
        fetch_step: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            num_rows, rows, panel, blocks, sums, fetched, fetch_step = args

            def emit(count: int) -> None:
                kind = ByteTile if chosen == "bytes" else BlockTile
                tile = kind(builder, block_format, count, chosen)
                totals = tile.multiply_panel(rows, panel, blocks, fetched, fetch_step)
                for row, total in enumerate(totals):
                    tile.vectors.store(total, builder.add(sums, WIDE(LINE * row)))

            emit_cases(builder, num_rows, most_rows, emit)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    # Numba tells functions apart by their names alone, also those of an argument.
    multiply.__name__ = f"multiply_{block_format.tensor_type.name}_{chosen}"
    return intrinsic(multiply)


@compile_inline
def tile_rows(rows: int) -> int:
    """Return the rows of a tile, where all tiles but the last have equally many."""
    tiles = (rows + MAX_TILE_ROWS - 1) // MAX_TILE_ROWS
    return (rows + tiles - 1) // tiles


@compile_inline
def store_sums(
    scratch: int, biases: int, out: int, is_half: bool, first: int, stride: int, rows: int
) -> None:
    """Store sums [rows, 16], with the biases of these outputs where there are any, from the output
    `first` on."""
    for row in range(rows):
        sums = carray(to_floats(scratch + LINE * row), (COLUMNS,))
        start = row * stride + first
        if is_half:
            halves = carray(advance(to_halves(out), start), (COLUMNS,))
            if biases != 0:
                added = carray(advance(to_halves(biases), first), (COLUMNS,))
                for i in range(COLUMNS):
                    halves[i] = narrow(sums[i] + widen(added[i]), halves[i])
            else:
                for i in range(COLUMNS):
                    halves[i] = narrow(sums[i], halves[i])
        else:
            floats = carray(advance(to_floats(out), start), (COLUMNS,))
            for i in range(COLUMNS):
                floats[i] = sums[i]
            if biases != 0:
                terms = carray(advance(to_floats(biases), first), (COLUMNS,))
                for i in range(COLUMNS):
                    floats[i] += terms[i]


# numbers of the job, after the function of a part
RECORDS = 1
PANELS = 2
NUM_PANELS = 3
PANEL_BYTES = 4
FIRST_OUTPUT = 5
BIASES = 6
OUT = 7
IS_HALF = 8
ROWS = 9
BLOCKS = 10
NUM_OUTPUTS = 11
SCRATCH = 12
STEP = 13
RECORD = 14  # its bytes


@compile_inline
def multiply_part(multiply: Any, team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of the job by the function of their type."""
    job = job_numbers(team)
    rows = job[ROWS]
    blocks = job[BLOCKS]
    panel_bytes = job[PANEL_BYTES]
    stride = job[NUM_OUTPUTS]
    is_half = job[IS_HALF] != 0
    scratch = job[SCRATCH] + member * SUMS_BYTES
    most = tile_rows(rows)
    # Only the first tile fetches: the next panel is here before the others begin.
    fetch_step = panel_bytes // blocks
    number_size = 2 if is_half else 4
    for index in range(part * job[STEP], min((part + 1) * job[STEP], job[NUM_PANELS])):
        panel = job[PANELS] + index * panel_bytes
        for row in range(0, rows, most):
            count = min(most, rows - row)
            records = job[RECORDS] + row * blocks * job[RECORD]
            fetched = panel + FETCH_AHEAD if row == 0 else panel
            multiply(count, records, panel, blocks, scratch, fetched, fetch_step)
            store_sums(
                scratch,
                job[BIASES],
                job[OUT] + number_size * row * stride,
                is_half,
                job[FIRST_OUTPUT] + index * COLUMNS,
                stride,
                count,
            )


multiply_q4_0 = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q4_0])
multiply_q4_1 = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q4_1])
multiply_q5_0 = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q5_0])
multiply_q8_0 = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q8_0])
multiply_q4_k = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q4_K])
multiply_q6_k = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q6_K])
multiply_q4_0_bytes = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q4_0], "bytes")
multiply_q4_1_bytes = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q4_1], "bytes")
multiply_q5_0_bytes = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q5_0], "bytes")
multiply_q8_0_bytes = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q8_0], "bytes")
multiply_q4_k_bytes = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q4_K], "bytes")
multiply_q6_k_bytes = make_multiply(FORMATS[gguf.GGMLQuantizationType.Q6_K], "bytes")


@compile_part
def part_q4_0(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q4_0."""
    multiply_part(multiply_q4_0, team, part, member)


@compile_part
def part_q4_1(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q4_1."""
    multiply_part(multiply_q4_1, team, part, member)


@compile_part
def part_q5_0(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q5_0."""
    multiply_part(multiply_q5_0, team, part, member)


@compile_part
def part_q8_0(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q8_0."""
    multiply_part(multiply_q8_0, team, part, member)


@compile_part
def part_q4_k(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q4_K."""
    multiply_part(multiply_q4_k, team, part, member)


@compile_part
def part_q6_k(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q6_K."""
    multiply_part(multiply_q6_k, team, part, member)


@compile_part
def part_q4_0_bytes(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q4_0 by rows in 8 bits."""
    multiply_part(multiply_q4_0_bytes, team, part, member)


@compile_part
def part_q4_1_bytes(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q4_1 by rows in 8 bits."""
    multiply_part(multiply_q4_1_bytes, team, part, member)


@compile_part
def part_q5_0_bytes(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q5_0 by rows in 8 bits."""
    multiply_part(multiply_q5_0_bytes, team, part, member)


@compile_part
def part_q8_0_bytes(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q8_0 by rows in 8 bits."""
    multiply_part(multiply_q8_0_bytes, team, part, member)


@compile_part
def part_q4_k_bytes(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q4_K by rows in 8 bits."""
    multiply_part(multiply_q4_k_bytes, team, part, member)


@compile_part
def part_q6_k_bytes(team: int, part: int, member: int) -> None:
    """Multiply a part of the panels of a job in Q6_K by rows in 8 bits."""
    multiply_part(multiply_q6_k_bytes, team, part, member)


PART_FUNCTIONS: dict[Any, Callable[[], Any]] = {
    gguf.GGMLQuantizationType.Q4_0: part_q4_0,
    gguf.GGMLQuantizationType.Q4_1: part_q4_1,
    gguf.GGMLQuantizationType.Q5_0: part_q5_0,
    gguf.GGMLQuantizationType.Q8_0: part_q8_0,
    gguf.GGMLQuantizationType.Q4_K: part_q4_k,
    gguf.GGMLQuantizationType.Q6_K: part_q6_k,
}
"""Compiles, at the first call, the function of a part of a job in a type."""
BYTE_PART_FUNCTIONS: dict[Any, Callable[[], Any]] = {
    gguf.GGMLQuantizationType.Q4_0: part_q4_0_bytes,
    gguf.GGMLQuantizationType.Q4_1: part_q4_1_bytes,
    gguf.GGMLQuantizationType.Q5_0: part_q5_0_bytes,
    gguf.GGMLQuantizationType.Q8_0: part_q8_0_bytes,
    gguf.GGMLQuantizationType.Q4_K: part_q4_k_bytes,
    gguf.GGMLQuantizationType.Q6_K: part_q6_k_bytes,
}
"""The same for rows in 8 bits."""


def make_rounding(emit: Callable[..., None]) -> Any:
    """Return the function that stores 32 numbers of a model, given by a pointer, as integers at the
    address `record`, with their scale and their sums. The scale is NaN if one of them is not
    finite. `emit` emits the integers and the scale.
    """

    def round_numbers(context: Any, x: Any, record: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vectors = VectorBuilder(builder)
            is_half = x.dtype == types.uint16
            size = LANES * (2 if is_half else 4)
            start = builder.ptrtoint(args[0], WIDE)
            halves = [
                vectors.load_widened(builder.add(start, WIDE(size * half)), is_half)
                for half in range(2)
            ]
            # Bits of magnitudes are in the order of the magnitudes, and those of no finite number
            # on top.
            mask = ir.Constant(WORDS, [0x7FFFFFFF] * LANES)
            bits = [builder.and_(builder.bitcast(half, WORDS), mask) for half in halves]
            largest = builder.select(builder.icmp_unsigned(">", *bits), *bits)
            emit(vectors, halves, _reduce(builder, "umax", largest), args[1])
            return context.get_dummy_value()

        return types.void(x, types.int64), generate

    # Numba tells functions apart by their names alone.
    round_numbers.__name__ = emit.__name__
    return intrinsic(round_numbers)


def emit_shorts(vectors: Any, halves: list[Any], largest: Any, record: Any) -> None:
    """Store 32 float32 as integers of 16 bits; their scale is a power of two."""
    builder = vectors.builder
    exponent = builder.lshr(largest, WORD(23))
    scale = builder.shl(builder.sub(exponent, WORD(MANTISSA_SHIFT)), WORD(23))
    factor = builder.shl(builder.sub(WORD(254 + MANTISSA_SHIFT), exponent), WORD(23))
    scale, factor = (builder.bitcast(word, FLOAT) for word in (scale, factor))
    scale, factor = _guard_scale(builder, exponent, scale, factor)
    limit = ir.Constant(WORDS, [32767] * LANES)
    rounded = []
    for half, words in enumerate(_round_numbers(vectors, halves, factor)):
        words = builder.select(builder.icmp_signed("<", words, limit), words, limit)
        shorts = builder.trunc(words, ir.VectorType(ir.IntType(16), LANES))
        vectors.store(shorts, builder.add(record, WIDE(2 * LANES * half)))
        rounded.append(words)
    _store_scale(vectors, rounded, scale, builder.add(record, WIDE(RECORD_BYTES - 16)))


def emit_bytes(vectors: Any, halves: list[Any], largest: Any, record: Any) -> None:
    """Store 32 float32 as integers of 8 bits, the largest as 127."""
    builder = vectors.builder
    exponent = builder.lshr(largest, WORD(23))
    magnitude = builder.bitcast(largest, FLOAT)
    scale = builder.fmul(magnitude, FLOAT(1 / LARGEST_BYTE))
    factor = builder.fdiv(FLOAT(LARGEST_BYTE), magnitude)
    scale, factor = _guard_scale(builder, exponent, scale, factor)
    order = [8 * eight + index for eight in range(LANES // 8) for index in BYTE_ORDER]
    rounded = _round_numbers(vectors, halves, factor)
    for half, words in enumerate(rounded):
        content = builder.trunc(words, BYTES)
        content = builder.shuffle_vector(content, content, ir.Constant(WORDS, order))
        vectors.store(content, builder.add(record, WIDE(LANES * half)))
    _store_scale(vectors, rounded, scale, builder.add(record, WIDE(BYTE_RECORD_BYTES - 16)))


def _guard_scale(builder: Any, exponent: Any, scale: Any, factor: Any) -> tuple[Any, Any]:
    """Return the scale of integers, and the factor that rounds numbers to them: zeros for numbers
    that are zeros, and a scale that is NaN where one is not finite.
    """
    is_zero = builder.icmp_unsigned("<", exponent, WORD(LEAST_EXPONENT))
    is_finite = builder.icmp_unsigned("<", exponent, WORD(255))
    zero = FLOAT(0.0)
    scale = builder.select(is_finite, scale, FLOAT(float("nan")))
    return builder.select(is_zero, zero, scale), builder.select(is_zero, zero, factor)


def _round_numbers(vectors: Any, halves: list[Any], factor: Any) -> list[Any]:
    """Return two vectors of float32 times a factor as the nearest integers, ties to even."""
    builder = vectors.builder
    rint = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(VECTOR, [VECTOR]), f"llvm.rint.v{LANES}f32"
    )
    factors = vectors.repeat(factor)
    scaled = [builder.fmul(numbers, factors) for numbers in halves]
    return [builder.fptosi(builder.call(rint, [numbers]), WORDS) for numbers in scaled]


def _store_scale(vectors: Any, rounded: list[Any], scale: Any, address: Any) -> None:
    """Store the scale of integers, and their sum and those of their halves times the scale."""
    builder = vectors.builder
    sums = [_reduce(builder, "add", words) for words in rounded]
    totals = builder.add(*sums), *sums
    scaled = [builder.fmul(builder.sitofp(number, FLOAT), scale) for number in totals]
    for number, value in enumerate([scale, *scaled]):
        vectors.store(value, builder.add(address, WIDE(4 * number)))


def _reduce(builder: Any, operation: str, words: Any) -> Any:
    """Return the sum or the largest of 16 words."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(WORD, [WORDS]), f"llvm.vector.reduce.{operation}.v16i32"
    )
    return builder.call(function, [words])


round_shorts = make_rounding(emit_shorts)
round_bytes = make_rounding(emit_bytes)


@compile_inline
def round_rows(x: Any, rows: int, width: int, record_bytes: int, records: int) -> None:
    """Store the records of rows [N, K], [B, rows of a tile] of every tile, in 16 or in 8 bits by
    the bytes of a record.
    """
    most = tile_rows(rows)
    blocks = width // BLOCK
    for row in range(rows):
        first = row // most * most
        count = min(most, rows - first)
        start = records + record_bytes * (first * blocks + row - first)
        for block in range(blocks):
            numbers = advance(x, row * width + block * BLOCK)
            record = start + record_bytes * count * block
            if record_bytes == BYTE_RECORD_BYTES:
                round_bytes(numbers, record)
            else:
                round_shorts(numbers, record)


@compile_cached
def multiply_segments(
    segments: int,
    num_segments: int,
    x: int,
    record_bytes: int,
    records: int,
    biases: int,
    out: int,
    is_half: bool,
    rows: int,
    width: int,
    num_outputs: int,
    scratch: int,
    team: int,
    members: int,
) -> None:
    """Store x [N, K] times the weights of all segments plus the biases [O], whose address may be 0,
    [N, O].

    A segment [5] is the function of a part, the address of panels, their number and bytes, and the
    output of the first one. `records` holds the rounded rows [N, B], whose blocks have so many
    bytes, `scratch` the sums of every thread. So many threads of the team share the panels.
    """
    if is_half:
        round_rows(to_halves(x), rows, width, record_bytes, records)
    else:
        round_rows(to_floats(x), rows, width, record_bytes, records)
    job = job_numbers(team)
    for index in range(num_segments):
        segment = carray(to_longs(segments + 8 * SEGMENT_SIZE * index), (SEGMENT_SIZE,))
        count = segment[2]
        # Panels of other products have twice as many outputs.
        sharing, step = divide_panels((count + 1) // 2, members)
        step = 2 * step
        job[0] = segment[0]
        job[RECORDS] = records
        job[PANELS] = segment[1]
        job[NUM_PANELS] = count
        job[PANEL_BYTES] = segment[3]
        job[FIRST_OUTPUT] = segment[4]
        job[BIASES] = biases
        job[OUT] = out
        job[IS_HALF] = 1 if is_half else 0
        job[ROWS] = rows
        job[BLOCKS] = width // BLOCK
        job[NUM_OUTPUTS] = num_outputs
        job[SCRATCH] = scratch
        job[STEP] = step
        job[RECORD] = record_bytes
        run_job(team, sharing, (count + step - 1) // step)


class BlockPanels:
    """Quantised weights [O, K] of a GGUF file in panels of 16 outputs."""

    def __init__(self, panels: Tensor, width: int, block_format: BlockFormat) -> None:
        self.panels = panels
        self.width = width
        self.block_format = block_format

    @staticmethod
    def allocate(outputs: int, width: int, tensor_type: Any) -> BlockPanels:
        """Return panels of weights [O, K] without values."""
        block_format = FORMATS[tensor_type]
        size = outputs // COLUMNS, block_format.panel_bytes(width)
        return BlockPanels(torch.empty(size, dtype=torch.uint8), width, block_format)

    def store_rows(self, first: int, content: Tensor) -> None:
        """Store rows as they lie in a file, bytes [n, size], from the output `first` on; both are
        multiples of 16.
        """
        panels = self.panels[first // COLUMNS : (first + len(content)) // COLUMNS]
        pack_panels(content, self.width, self.block_format, panels)

    @property
    def shape(self) -> tuple[int, int]:
        """Output and input width."""
        return len(self.panels) * COLUMNS, self.width

    @property
    def content(self) -> Tensor:
        """The bytes of the panels."""
        return self.panels

    def first_rows(self, count: int) -> BlockPanels:
        """Return the first outputs, `count` up to a multiple of 16, in the same memory."""
        panels = self.panels[: -(-count // COLUMNS)]
        return BlockPanels(panels, self.width, self.block_format)

    @cached_property
    def own_product(self) -> BlockProduct:
        """The product with these weights alone."""
        return BlockProduct([self])

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [.., K] times the weights plus the bias, [.., O]."""
        return self.own_product.product(x, bias)

    def values(self, rows: Tensor) -> Tensor:
        """Return the float32 values of some outputs [n] of the weights, [n, K]."""
        if not len(rows):
            return torch.empty(0, self.width)
        numbers = rows // COLUMNS
        kept, places = numbers.unique(return_inverse=True)
        values = unpack_panels(self.panels[kept], self.width, self.block_format)
        return values[places * COLUMNS + rows % COLUMNS]

    def all_values(self, dtype: torch.dtype) -> Tensor:
        """Return the values of the weights in a type, [O, K]."""
        outputs, width = self.shape
        values = torch.empty(outputs, width, dtype=dtype)
        step = max(1, (1 << 20) // (COLUMNS * width))
        for first in range(0, len(self.panels), step):
            part = self.panels[first : first + step]
            rows = slice(first * COLUMNS, first * COLUMNS + len(part) * COLUMNS)
            values[rows] = unpack_panels(part, width, self.block_format).to(dtype)
        return values


class BlockProduct:
    """The product of rows with quantised weights, or with several below each other. Rows are
    rounded to 16 bits, or with `low_precision` to 8 where the processor multiplies these.
    """

    serve_many_rows = True

    @property
    def is_enabled(self) -> bool:
        """Whether kernels are switched on."""
        return has_block_kernels()

    def __init__(self, weights: list[BlockPanels], low_precision: bool = False) -> None:
        self.weights = weights
        self.width = weights[0].width
        in_bytes = low_precision and has_fused_words()
        self.record_bytes = BYTE_RECORD_BYTES if in_bytes else RECORD_BYTES
        functions = BYTE_PART_FUNCTIONS if in_bytes else PART_FUNCTIONS
        numbers = []
        first = 0
        for weight in weights:
            function = functions[weight.block_format.tensor_type]().address
            panels = weight.panels
            numbers.append([function, panels.data_ptr(), len(panels), panels.stride(0), first])
            first += weight.shape[0]
        self.num_outputs = first
        self.segments = torch.tensor(numbers, dtype=torch.int64)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [.., K] times the weights plus the bias, [.., O], in the type of x, which is
        bfloat16 or float32.
        """
        x = x if x.is_contiguous() else x.contiguous()
        out = x.new_empty((*x.shape[:-1], self.num_outputs))
        rows = x.numel() // self.width
        if not out.numel():
            return out
        # A call holds Python's lock, so no other one uses the team and this memory at the same
        # time.
        team = current_team()
        records = record_memory(rows * self.width // BLOCK * self.record_bytes)
        multiply_segments(
            self.segments.data_ptr(),
            len(self.segments),
            x.data_ptr(),
            self.record_bytes,
            records.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.dtype == torch.bfloat16,
            rows,
            self.width,
            self.num_outputs,
            working_sums().data_ptr(),
            team.address,
            team.grow(torch.get_num_threads()),
        )
        return out


_records: list[Tensor] = []


def record_memory(num_bytes: int) -> Tensor:
    """Return memory for the rounded rows of a product, which the next product overwrites."""
    if not _records or _records[0].nbytes < num_bytes:
        _records[:] = [torch.empty(num_bytes, dtype=torch.uint8)]
    return _records[0]


@cache
def working_sums() -> Tensor:
    """Return the working memory of all products, for every thread of a team."""
    return torch.empty(MAX_MEMBERS, MAX_TILE_ROWS, COLUMNS)
