"""Attention with one query token per text on a CPU, compiled by Numba, with the bits of the kernel of trees (`cpu_attention`).

A tree has enough queries to fill vectors; a single token has G = H / K queries per key-value head, which would leave most lanes
empty. Here the lanes of scores [G, T] are keys, which are transposed as they are read, and those of weighted values [G, d] are
numbers of a head. Every number is still a float64 sum in the order of d, or of the slots. While one array of a text is read,
the next one is fetched, because many texts exceed every cache. In turn over 64 texts of 330 tokens and 30 layers, one text of a
layer of SmolLM2 takes 21 us, where the kernel of trees takes 70.

Shapes: T key slots, H query heads, K key-value heads, d head size, a multiple of 32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types

from .cpu_vectors import (
    LANES,
    VECTOR_BYTES,
    WIDE,
    WORD,
    VectorBuilder,
    advance,
    compile_inline,
    emit_cases,
    emit_fetch,
    intrinsic,
    narrow,
    to_doubles,
    widen,
)

KEYS = 16  # keys that are scored at a time
COLUMNS = 32  # numbers of a head that are added at a time
MAX_GROUP = 5  # query heads per key-value head whose sums fit in the registers
LINE = 64  # bytes
WORDS = ir.VectorType(WORD, LANES)
HALVES = ir.VectorType(ir.IntType(16), LANES)
FLOATS = ir.VectorType(ir.FloatType(), LANES)
DOUBLES = ir.VectorType(ir.DoubleType(), LANES)
UNPACK_WORDS = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
UNPACK_PAIRS = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
JOIN_HALVES = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]


def _shuffle(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(WORDS, order))


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """Return the columns of 8 vectors of 8 words."""
    words = [_shuffle(builder, rows[i], rows[i + 1], order) for i in (0, 2, 4, 6) for order in UNPACK_WORDS]
    quads = [
        [_shuffle(builder, words[i + k], words[i + k + 2], order) for k in (0, 1) for order in UNPACK_PAIRS] for i in (0, 4)
    ]
    return [_shuffle(builder, quads[0][i], quads[1][i], order) for order in JOIN_HALVES for i in range(4)]


def _to_doubles(builder: Any, words: Any) -> Any:
    """Return float64 numbers of the bits of float32."""
    return builder.fpext(builder.bitcast(words, FLOATS), DOUBLES)


@intrinsic
def _score_keys(
    context: Any, group: Any, keys: Any, stride: Any, first: Any, last: Any, queries: Any, parts: Any, out: Any, out_stride: Any
) -> Any:
    """Store the scores of 16 keys from number `first` on, of which those after `last` repeat it.

    Arguments: the number of queries, the address of the keys of a head and the bytes between them, two numbers of keys, the
    address of float64 queries [G, d], d / 16, the address of the scores, and the bytes between those of two queries.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        group, keys, stride, first, last, queries, parts, out, out_stride = args
        numbers = [builder.add(first, WIDE(i)) for i in range(KEYS)]
        clamped = [builder.select(builder.icmp_signed("<", number, last), number, last) for number in numbers]
        rows = [builder.add(keys, builder.mul(number, stride)) for number in clamped]
        vectors, query_stride = VectorBuilder(builder), builder.mul(parts, WIDE(8 * KEYS))

        def emit(count: int) -> None:
            starts = [builder.add(queries, builder.mul(query_stride, WIDE(g))) for g in range(count)]

            def add_part(index: Any, sums: list[Any]) -> list[Any]:
                sums, shift = list(sums), builder.mul(index, WIDE(4 * LANES))
                moved = [builder.add(start, builder.mul(index, WIDE(8 * KEYS))) for start in starts]
                pointers = [builder.inttoptr(builder.add(row, shift), WORDS.as_pointer()) for row in rows]
                words = [builder.load(pointer, align=2) for pointer in pointers]
                columns = [_transpose(builder, words[:LANES]), _transpose(builder, words[LANES:])]
                for pair in range(LANES):
                    even = [builder.shl(half[pair], ir.Constant(WORDS, [16] * LANES)) for half in columns]
                    odd = [builder.and_(half[pair], ir.Constant(WORDS, [0xFFFF0000] * LANES)) for half in columns]
                    for side, halves in enumerate((even, odd)):
                        numbers = [_to_doubles(builder, words) for words in halves]
                        for g in range(count):
                            query = vectors.load_repeated(builder.add(moved[g], WIDE(8 * (2 * pair + side))))
                            for half in range(2):
                                sums[2 * g + half] = vectors.multiply_add(query, numbers[half], sums[2 * g + half])
                return sums

            sums = vectors.loop(parts, [vectors.constant(0.0)] * (2 * count), add_part)
            for g in range(count):
                for half in range(2):
                    vectors.store(
                        sums[2 * g + half], builder.add(builder.add(out, builder.mul(out_stride, WIDE(g))), WIDE(64 * half))
                    )

        emit_cases(builder, group, MAX_GROUP, emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


@intrinsic
def _exp_row(context: Any, scores: Any, num_vectors: Any) -> Any:
    """Replace float64 scores [8 vectors] by e^(score - largest)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, num_vectors = args
        vectors = VectorBuilder(builder)

        def address(index: Any) -> Any:
            return builder.add(scores, builder.mul(index, WIDE(VECTOR_BYTES)))

        def take_largest(index: Any, values: list[Any]) -> list[Any]:
            return [vectors.maximum(vectors.load(address(index)), values[0])]

        (lanes,) = vectors.loop(num_vectors, [vectors.load(scores)], take_largest)
        largest = builder.extract_element(lanes, WORD(0))
        for lane in range(1, LANES):
            other = builder.extract_element(lanes, WORD(lane))
            largest = builder.select(builder.fcmp_ordered(">", other, largest), other, largest)
        repeated = vectors.repeat(largest)

        def exponentiate(index: Any, values: list[Any]) -> list[Any]:
            vectors.store(vectors.exp(builder.fsub(vectors.load(address(index)), repeated)), address(index))
            return []

        vectors.loop(num_vectors, [], exponentiate)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _add_values(
    context: Any, group: Any, weights: Any, weight_stride: Any, values: Any, stride: Any, count: Any, sums: Any,
    sum_stride: Any, totals: Any,
) -> Any:  # fmt: skip
    """Add weighted values [count, 32] of a head to float64 sums [G, 32], and the weights to totals [G, 8] (8 times the same).

    Arguments: the number of queries, the address of float64 weights [G, count] and the bytes between those of two queries, the
    address of the values and the bytes between them, their number, the address of the sums and the bytes between those of two
    queries, and the address of the totals.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        group, weights, weight_stride, values, stride, count, sums, sum_stride, totals = args
        vectors, parts = VectorBuilder(builder), range(COLUMNS // LANES)

        def emit(number: int) -> None:
            queries = range(number)
            rows = [builder.add(weights, builder.mul(weight_stride, WIDE(g))) for g in queries]
            starts = [builder.add(sums, builder.mul(sum_stride, WIDE(g))) for g in queries]
            outputs = [builder.add(start, WIDE(VECTOR_BYTES * part)) for start in starts for part in parts]
            outputs += [builder.add(totals, WIDE(VECTOR_BYTES * g)) for g in queries]

            def add_row(index: Any, before: list[Any]) -> list[Any]:
                row, after = builder.add(values, builder.mul(index, stride)), []
                pointers = [builder.inttoptr(builder.add(row, WIDE(16 * part)), HALVES.as_pointer()) for part in parts]
                words = [builder.zext(builder.load(pointer, align=2), WORDS) for pointer in pointers]
                numbers = [_to_doubles(builder, builder.shl(word, ir.Constant(WORDS, [16] * LANES))) for word in words]
                factors = [vectors.load_repeated(vectors.address(start, index)) for start in rows]
                for g in queries:
                    after += [vectors.multiply_add(factors[g], numbers[j], before[g * len(parts) + j]) for j in parts]
                return after + [builder.fadd(before[number * len(parts) + g], factors[g]) for g in queries]

            for value, output in zip(vectors.loop(count, [vectors.load(x) for x in outputs], add_row), outputs):
                vectors.store(value, output)

        emit_cases(builder, group, MAX_GROUP, emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


@intrinsic
def _fetch(context: Any, address: Any) -> Any:
    """Fetch the line of an address into the second-level cache."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_fetch(builder, args[0], 2)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@compile_inline
def _fetch_share(start: int, num_bytes: int, share: int, num_shares: int) -> None:
    """Fetch one of equal shares of a range of memory."""
    lines = (num_bytes + LINE - 1) // LINE
    each = (lines + num_shares - 1) // num_shares
    for line in range(share * each, min(lines, (share + 1) * each)):
        _fetch(start + LINE * line)


@compile_inline
def attend_single(
    queries: Any, keys: int, values: int, slot_bytes: int, length: int, num_heads: int, num_key_heads: int, head_size: int,
    out: Any, scale: float, scratch: int, next_keys: int, next_length: int,
) -> None:  # fmt: skip
    """Attend with the queries [H, d] of one token to slots [T, K d] of bfloat16, into [H, d], and fetch the keys of the next
    text."""
    group, slots = num_heads // num_key_heads, (length + KEYS - 1) // KEYS * KEYS
    scores = scratch + 8 * group * head_size
    sums = scores + 8 * group * slots
    totals = sums + 8 * group * head_size
    scaled = carray(to_doubles(scratch), (group * head_size,))
    all_sums, all_totals = carray(to_doubles(sums), (group * head_size,)), carray(to_doubles(totals), (LANES * group,))
    num_parts, num_chunks = head_size // COLUMNS, slots // KEYS
    for head in range(num_key_heads):
        q = carray(advance(queries, head * group * head_size), (group * head_size,))
        for i in range(group * head_size):
            scaled[i] = widen(q[i]) * scale
        # 1. Scores [G, T], while the values are fetched.
        shift = 2 * head * head_size
        for chunk in range(num_chunks):
            _fetch_share(values, slot_bytes * length, head * num_chunks + chunk, num_key_heads * num_chunks)
            _score_keys(
                group, keys + shift, slot_bytes, chunk * KEYS, length - 1, scratch, head_size // KEYS,
                scores + 8 * chunk * KEYS, 8 * slots,
            )  # fmt: skip
        # 2. Weights.
        for g in range(group):
            _exp_row(scores + 8 * g * slots, slots // LANES)
        # 3. Weighted values [G, d], while the next keys are fetched.
        all_sums[:] = 0.0
        for part in range(num_parts):
            all_totals[:] = 0.0
            for chunk in range(num_chunks):
                share = (head * num_parts + part) * num_chunks + chunk
                _fetch_share(next_keys, slot_bytes * next_length, share, num_key_heads * num_parts * num_chunks)
                first = chunk * KEYS
                _add_values(
                    group, scores + 8 * first, 8 * slots, values + shift + 2 * part * COLUMNS + first * slot_bytes, slot_bytes,
                    min(KEYS, length - first), sums + 8 * part * COLUMNS, 8 * head_size, totals,
                )  # fmt: skip
        result = carray(advance(out, head * group * head_size), (group * head_size,))
        for i in range(group * head_size):
            result[i] = narrow(np.float32(all_sums[i] / all_totals[i // head_size * LANES]), result[i])
