"""Rows of inputs, rounded for products with the quantised weights of GGUF files.

In 16 bits, 32 inputs share a scale that is a power of two, so numbers of bfloat16 down to 1/128 of
the largest of the 32 are exact. In 8 bits, as llama.cpp's inputs are, the largest of the 32 is 127.

Shapes: N rows, K input width, B blocks of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from .block_formats import BLOCK
from .vectors import (
    FLOAT,
    LANES,
    VECTOR,
    WIDE,
    WORD,
    WORDS,
    VectorBuilder,
    advance,
    compile_inline,
    intrinsic,
)

# Rows whose sums fit in the registers, of which AVX-512 has 32 and AVX2 has 16 of half the size.
MAX_TILE_ROWS = 8 if torch.cpu._is_avx512_supported() else 2
# A rounded block of a row: 32 integers of 16 or 8 bits, then in float32 their scale and their sum.
# Behind 16 bits come the sums of their halves in float32, and behind 8 bits these sums as integers
# of 32 bits, times SUM_FACTOR.
RECORD_BYTES = 2 * BLOCK + 16
BYTE_RECORD_BYTES = BLOCK + 16
SUM_FACTOR = -32
"""What Q6_K, whose integers have an offset of 32, adds to its sums for every unit of an input."""
# Rows are rounded to integers below 2^15, or up to 127.
MANTISSA_SHIFT = 14
LARGEST_BYTE = 127
BYTE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The order of eight inputs in a record of bytes: as masks take weights out of a line."""
LEAST_EXPONENT = 32  # of rows that are no zeros, with the bias of float32
BYTES = ir.VectorType(ir.IntType(8), LANES)


@compile_inline
def tile_rows(rows: int) -> int:
    """Return the rows of a tile, where all tiles but the last have equally many."""
    tiles = (rows + MAX_TILE_ROWS - 1) // MAX_TILE_ROWS
    return (rows + tiles - 1) // tiles


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
    address = builder.add(record, WIDE(RECORD_BYTES - 16))
    sums = _store_scale(vectors, rounded, scale, address)
    for half, number in enumerate(sums):
        value = builder.fmul(builder.sitofp(number, FLOAT), scale)
        vectors.store(value, builder.add(address, WIDE(8 + 4 * half)))


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
    address = builder.add(record, WIDE(BYTE_RECORD_BYTES - 16))
    sums = _store_scale(vectors, rounded, scale, address)
    for half, number in enumerate(sums):
        value = builder.mul(number, WORD(SUM_FACTOR))
        vectors.store(value, builder.add(address, WIDE(8 + 4 * half)))


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


def _store_scale(vectors: Any, rounded: list[Any], scale: Any, address: Any) -> list[Any]:
    """Store the scale of integers, and their sum times the scale; return the sums of their
    halves.
    """
    builder = vectors.builder
    sums = [_reduce(builder, "add", words) for words in rounded]
    total = builder.fmul(builder.sitofp(builder.add(*sums), FLOAT), scale)
    vectors.store(scale, address)
    vectors.store(total, builder.add(address, WIDE(4)))
    return sums


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
