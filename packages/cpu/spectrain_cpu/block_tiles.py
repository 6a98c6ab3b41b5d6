"""Products of a few rounded rows with a panel of quantised weights, as LLVM code.

A block is read and its integers are taken apart once for all rows of a tile. With AVX-512 an
instruction adds 32 products of 16 bits (VNNI); elsewhere the same sums take two instructions, or
four with AVX2. On an EPYC (Zen 4) the pairs of bfloat16 would take as many instructions, and their
weights more work to take apart. Of 8 bits an instruction adds 64 products, with VNNI alone.

`block_rows` says what a rounded row holds, and `block_formats` how weights lie in a panel.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba import types

from .block_formats import COLUMNS, LINE, VECTORS, BlockFormat
from .block_rows import BYTE_RECORD_BYTES, BYTES, MAX_TILE_ROWS, RECORD_BYTES, SUM_FACTOR
from .vectors import (
    FLOAT,
    LANES,
    VECTOR,
    WIDE,
    WORD,
    WORDS,
    VectorBuilder,
    emit_cases,
    emit_fetch,
    intrinsic,
)

SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)
HALF_FLOATS = ir.VectorType(ir.HalfType(), LANES)
HALF_WORDS = ir.VectorType(WORD, LANES // 2)


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

    def multiply_panel(self, rows: Any, panel: Any, blocks: Any, ahead: Any) -> list[Any]:
        """Return the sums of the rows over all blocks, 16 outputs each.

        Arguments: the addresses of the rows' records and of the panel, its number of blocks, and
        the bytes by which memory is fetched ahead.
        """
        builder = self.builder
        group_blocks = self.format.group_blocks
        groups = builder.udiv(blocks, WIDE(group_blocks))

        def add_group(group: Any, totals: list[Any]) -> list[Any]:
            numbers = self.vectors.offset(panel, group, self.format.group_bytes)
            integers = builder.add(numbers, WIDE(self.format.scale_bytes))
            first = builder.mul(group, WIDE(group_blocks))
            self._fetch(builder.add(numbers, ahead), self.format.scale_bytes)
            scale = self._load_halves(numbers, 0)
            minimum = self._load_halves(numbers, 1) if self.format.has_minimum else None

            def add_block(index: Any, totals: list[Any]) -> list[Any]:
                block = self.vectors.offset(integers, index, self.format.block_bytes)
                self._fetch(builder.add(block, ahead), self.format.block_bytes)
                return self._add_block(
                    self.vectors.offset(
                        rows, builder.add(first, index), self.record_bytes * self.num_rows
                    ),
                    block,
                    self._part_scales(numbers, index, scale, minimum),
                    totals,
                )

            if group_blocks == 1:
                return add_block(WIDE(0), totals)
            return self.vectors.loop(WIDE(group_blocks), totals, add_block)

        return self.vectors.loop(groups, [self.vectors.constant(0.0)] * self.num_rows, add_group)

    def _fetch(self, address: Any, size: int) -> None:
        """Fetch the lines of so many bytes. A single row reads a panel so evenly that the processor
        fetches by itself, and a tenth to a half faster than it is told to.
        """
        if self.num_rows == 1:
            return
        for line in range(-(-size // LINE)):
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
        if minimum is not None or not self.format.offset:
            return minimum
        return self.builder.fmul(scale, self.vectors.constant(-float(self.format.offset)))

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
        totals = list(totals)
        for number, (scale, minimum) in enumerate(parts):
            sums = self._sum_part(rows, block, number, len(parts))
            for row in range(self.num_rows):
                factor = self._load_number(rows, row, 0)
                totals[row] = self.vectors.multiply_add(
                    sums[row], builder.fmul(scale, factor), totals[row]
                )
                if minimum is not None:
                    index = 1 if len(parts) == 1 else 2 + number
                    inputs = self._load_number(rows, row, index)
                    totals[row] = self.vectors.multiply_add(minimum, inputs, totals[row])
        return totals

    def _sum_part(self, rows: Any, block: Any, number: int, num_parts: int) -> list[Any]:
        """Return the products of a part of a block with every row: integers, as float32."""
        builder = self.builder
        count = self.num_steps // num_parts
        # A few rows have two chains of sums, because each addition waits for the one before it.
        chains = 2 if self.num_rows < 3 else 1
        zeros = ir.Constant(WORDS, [0] * LANES)
        sums = []
        for row in range(self.num_rows):
            start = self._start_sum(rows, row, number, num_parts)
            sums.append([start] + [zeros] * (chains - 1))
        for index, weights in enumerate(self._iterate_steps(block, number * count, count)):
            chain = index % chains
            for row in range(self.num_rows):
                offset = self.record_bytes * row + 4 * (number * count + index)
                sums[row][chain] = self._add_products(sums[row][chain], weights, rows, offset)
        totals = [row[0] if chains == 1 else builder.add(*row) for row in sums]
        return [builder.sitofp(total, VECTOR) for total in totals]

    def _start_sum(self, rows: Any, row: int, number: int, num_parts: int) -> Any:
        """Return what the sums of a part of a block begin with."""
        return ir.Constant(WORDS, [0] * LANES)

    def _load_number(self, rows: Any, row: int, index: int, kind: Any = FLOAT) -> Any:
        """Return a number behind the integers of a row's record in every lane."""
        offset = self.record_bytes * row + self.record_bytes - 16 + 4 * index
        return self.vectors.load_repeated(self.builder.add(rows, WIDE(offset)), kind)

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
        return [
            self._load_line(block, LINE * self.format.find_low_line(count * four + index))
            for index in range(count)
        ]

    def _load_high_line(self, block: Any, index: int) -> Any:
        return self._load_line(block, LINE * self.format.find_high_line(index))

    def _high_start(self, four: int, field: int) -> int:
        """Return the first bit, in a byte, of the high bits of a field of four vectors."""
        bits = self.format.high_bits
        return bits * (2 * (four % self.format.lines_per_high) + field)

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

    def _add_offset(self, scale: Any, minimum: Any) -> Any:
        """Return the minimum of the file alone, because sums begin with what the offset adds."""
        return minimum

    def _start_sum(self, rows: Any, row: int, number: int, num_parts: int) -> Any:
        """Return what the offset of the weights adds to the products of a part of a block."""
        if not self.offset:
            return super()._start_sum(rows, row, number, num_parts)
        halves = range(2) if num_parts == 1 else [number]
        sums = [self._load_number(rows, row, 2 + half, WORD) for half in halves]
        total = sums[0] if len(sums) == 1 else self.builder.add(*sums)
        shift = self.offset.bit_length() - (-SUM_FACTOR).bit_length()
        change = self.builder.shl if shift > 0 else self.builder.ashr
        return change(total, ir.Constant(WORDS, [abs(shift)] * LANES)) if shift else total

    def _add_block(
        self, rows: Any, block: Any, parts: list[tuple[Any, Any]], totals: list[Any]
    ) -> list[Any]:
        """Add the products of a block to the sums of the rows. The parts of a block share the scale
        of a row, by which their sum is multiplied: an instruction less than for each part.
        """
        if len(parts) == 1:
            return super()._add_block(rows, block, parts, totals)
        sums = [self.vectors.constant(0.0)] * self.num_rows
        for number, (scale, _) in enumerate(parts):
            products = self._sum_part(rows, block, number, len(parts))
            for row, product in enumerate(products):
                sums[row] = (
                    self.builder.fmul(product, scale)
                    if number == 0
                    else self.vectors.multiply_add(product, scale, sums[row])
                )
        return [
            self.vectors.multiply_add(sums[row], self._load_number(rows, row, 0), total)
            for row, total in enumerate(totals)
        ]

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
    panel, its number of blocks, the address of float32 sums [rows, 16], and the bytes by which
    memory is fetched ahead.
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
        ahead: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            num_rows, rows, panel, blocks, sums, ahead = args

            def emit(count: int) -> None:
                kind = ByteTile if chosen == "bytes" else BlockTile
                tile = kind(builder, block_format, count, chosen)
                totals = tile.multiply_panel(rows, panel, blocks, ahead)
                for row, total in enumerate(totals):
                    tile.vectors.store(total, builder.add(sums, WIDE(LINE * row)))

            emit_cases(builder, num_rows, most_rows, emit)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    # Numba tells functions apart by their names alone, also those of an argument.
    multiply.__name__ = f"multiply_{block_format.tensor_type.name}_{chosen}"
    return intrinsic(multiply)
