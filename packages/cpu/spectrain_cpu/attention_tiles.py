"""Tiles of attention on a CPU, emitted as LLVM vector code: scores of keys, their exponentials,
weighted sums of values.

Tiles sum in float32 in a fixed order, whatever the size of the tile. Keys and values are bfloat16,
read as uint16, or float32.
"""

from __future__ import annotations

from typing import Any

from numba import types

from .vectors import (
    FLOAT,
    LANES,
    VECTOR_BYTES,
    WIDE,
    WORD,
    WORDS,
    VectorBuilder,
    emit_fetch,
    intrinsic,
)

LINE = 64  # bytes of a cache line
PARTS = 4  # of a column, whose largest numbers are searched at the same time


def make_score_product(num_keys: int, num_vectors: int) -> Any:
    """Return a function that stores the scores of keys with 16 queries a vector, [keys, 16
    vectors], in float32.

    Arguments: the pointer of the first key and the numbers between keys; the address of the
    queries, transposed, [words, P] words of 32 bits; the bytes of a row of P words or scores; the
    address of the scores; the number of words of a key, and the factor of all scores. Each score is
    summed in the order of the words.
    """

    @intrinsic
    def multiply(
        context: Any,
        keys: Any,
        key_stride: Any,
        queries: Any,
        row_bytes: Any,
        scores: Any,
        words: Any,
        scale: Any,
    ) -> Any:
        is_half = keys.dtype == types.uint16

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            keys, key_stride, queries, row_bytes, scores, words, scale = args
            vectors = VectorBuilder(builder)
            columns = range(num_vectors)
            multiply_add = vectors.multiply_pairs if is_half else vectors.multiply_words
            start = builder.ptrtoint(keys, WIDE)
            shifts = [
                builder.mul(key_stride, WIDE((2 if is_half else 4) * k)) for k in range(num_keys)
            ]

            def add_word(i: Any, sums: list[Any]) -> list[Any]:
                row = vectors.offset(queries, builder.mul(i, row_bytes))
                parts = [
                    vectors.load(builder.add(row, WIDE(VECTOR_BYTES * j)), WORDS) for j in columns
                ]
                first = vectors.offset(start, i, 4)
                after = []
                for k, shift in enumerate(shifts):
                    word = vectors.load_repeated(builder.add(first, shift), WORD)
                    for j in columns:
                        after.append(multiply_add(word, parts[j], sums[k * num_vectors + j]))
                return after

            factor = vectors.repeat(scale)
            totals = vectors.loop(
                words, [vectors.constant(0.0)] * (num_keys * num_vectors), add_word
            )
            for number, total in enumerate(totals):
                row = vectors.offset(scores, builder.mul(row_bytes, WIDE(number // num_vectors)))
                vectors.store(
                    builder.fmul(total, factor),
                    builder.add(row, WIDE(VECTOR_BYTES * (number % num_vectors))),
                )
            return context.get_dummy_value()

        return types.void(keys, *[types.int64] * 5, types.float32), generate

    return multiply


def make_value_sum(num_rows: int, num_vectors: int) -> Any:
    """Return a function that stores weighted sums of values, [rows, 16 vectors], in float32, each
    added in the order of slots.

    Arguments: the pointer of the first value and the numbers between values; the address of the
    weights, the bytes between slots and between rows; the address of the sums and the bytes between
    rows; the number of slots, at least 1.
    """

    @intrinsic
    def multiply(
        context: Any,
        values: Any,
        value_stride: Any,
        weights: Any,
        weight_bytes: Any,
        row_bytes: Any,
        sums: Any,
        sum_bytes: Any,
        slots: Any,
    ) -> Any:
        is_half = values.dtype == types.uint16
        size = 2 if is_half else 4

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values, value_stride, weights, weight_bytes, row_bytes, sums, sum_bytes, slots = args
            vectors = VectorBuilder(builder)
            columns = range(num_vectors)
            start = builder.ptrtoint(values, WIDE)
            rows = [builder.mul(row_bytes, WIDE(r)) for r in range(num_rows)]

            def add_slot(t: Any, totals: list[Any]) -> list[Any]:
                value = vectors.offset(start, builder.mul(t, value_stride), size)
                parts = [
                    vectors.load_widened(builder.add(value, WIDE(size * LANES * j)), is_half)
                    for j in columns
                ]
                first = vectors.offset(weights, builder.mul(t, weight_bytes))
                after = []
                for r in range(num_rows):
                    weight = vectors.load_repeated(builder.add(first, rows[r]))
                    after += [
                        vectors.multiply_add(weight, parts[j], totals[r * num_vectors + j])
                        for j in columns
                    ]
                return after

            totals = vectors.loop(
                slots, [vectors.constant(0.0)] * (num_rows * num_vectors), add_slot
            )
            for number, total in enumerate(totals):
                row = vectors.offset(sums, builder.mul(sum_bytes, WIDE(number // num_vectors)))
                vectors.store(total, builder.add(row, WIDE(VECTOR_BYTES * (number % num_vectors))))
            return context.get_dummy_value()

        return types.void(values, *[types.int64] * 7), generate

    return multiply


def make_transposed_product(num_rows: int) -> Any:
    """Return a function that stores the scores of 16 keys with few queries, [rows, 16], in float32.

    Words of the keys are transposed in registers, so that a lane belongs to a key. Arguments: the
    pointer of the first key and the numbers between keys; the address of the queries [rows, words];
    the address of the scores and the bytes between their rows; the number of words of a key, a
    multiple of 16, and the factor of all scores. Each score is summed in the order of the words.
    """

    @intrinsic
    def multiply(
        context: Any,
        keys: Any,
        key_stride: Any,
        queries: Any,
        scores: Any,
        row_bytes: Any,
        words: Any,
        scale: Any,
    ) -> Any:
        is_half = keys.dtype == types.uint16

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            keys, key_stride, queries, scores, row_bytes, words, scale = args
            vectors = VectorBuilder(builder)
            multiply_add = vectors.multiply_pairs if is_half else vectors.multiply_words
            start = builder.ptrtoint(keys, WIDE)
            width = builder.mul(words, WIDE(4))
            shifts = [
                builder.mul(key_stride, WIDE((2 if is_half else 4) * k)) for k in range(LANES)
            ]

            def add_words(block: Any, sums: list[Any]) -> list[Any]:
                first, query = (
                    vectors.offset(base, block, VECTOR_BYTES) for base in (start, queries)
                )
                loaded = [vectors.load(builder.add(first, shift), WORDS) for shift in shifts]
                for i, part in enumerate(vectors.transpose(loaded)):
                    addresses = [
                        builder.add(query, builder.add(builder.mul(width, WIDE(r)), WIDE(4 * i)))
                        for r in range(num_rows)
                    ]
                    sums = [
                        multiply_add(vectors.load_repeated(address, WORD), part, total)
                        for address, total in zip(addresses, sums)
                    ]
                return sums

            factor = vectors.repeat(scale)
            blocks = builder.udiv(words, WIDE(LANES))
            for r, total in enumerate(
                vectors.loop(blocks, [vectors.constant(0.0)] * num_rows, add_words)
            ):
                vectors.store(
                    builder.fmul(total, factor),
                    builder.add(scores, builder.mul(row_bytes, WIDE(r))),
                )
            return context.get_dummy_value()

        return types.void(keys, *[types.int64] * 5, types.float32), generate

    return multiply


@intrinsic
def exp_row(context: Any, scores: Any, blocks: Any) -> Any:
    """Replace a row of float32 scores [16 blocks] by e^(score - largest)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, blocks = args
        vectors = VectorBuilder(builder)

        def load_block(index: Any) -> Any:
            return vectors.load(vectors.offset(scores, index, VECTOR_BYTES))

        def take_largest(index: Any, values: list[Any]) -> list[Any]:
            return [vectors.maximum(load_block(index), values[0])]

        (largest,) = vectors.loop(blocks, [load_block(WIDE(0))], take_largest)
        highest = vectors.repeat(vectors.reduce_maximum(largest))

        def exponentiate(index: Any, values: list[Any]) -> list[Any]:
            vectors.store(
                vectors.exp(builder.fsub(load_block(index), highest)),
                vectors.offset(scores, index, VECTOR_BYTES),
            )
            return []

        vectors.loop(blocks, [], exponentiate)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def fetch_lines(context: Any, numbers: Any, count: Any) -> Any:
    """Fetch the cache lines of `count` numbers of a model into the second-level cache."""
    size = 2 if numbers.dtype == types.uint16 else 4

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = VectorBuilder(builder)
        start = builder.ptrtoint(args[0], WIDE)
        lines = builder.udiv(
            builder.add(builder.mul(args[1], WIDE(size)), WIDE(LINE - 1)), WIDE(LINE)
        )

        def fetch(index: Any, values: list[Any]) -> list[Any]:
            emit_fetch(builder, vectors.offset(start, index, LINE), 2)
            return []

        vectors.loop(lines, [], fetch)
        return context.get_dummy_value()

    return types.void(numbers, types.int64), generate


def make_weight_sum(num_rows: int) -> Any:
    """Return a function that stores the sums of rows of float32 weights, each added in the order of
    slots.

    Arguments: the address of the weights and the bytes between rows; the number of slots, at least
    1; the address of the sums.
    """

    @intrinsic
    def add(context: Any, weights: Any, row_bytes: Any, slots: Any, sums: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            weights, row_bytes, slots, sums = args
            vectors = VectorBuilder(builder)
            rows = [builder.add(weights, builder.mul(row_bytes, WIDE(r))) for r in range(num_rows)]

            def add_slot(t: Any, totals: list[Any]) -> list[Any]:
                return [
                    builder.fadd(total, vectors.load(vectors.offset(row, t, 4), FLOAT))
                    for total, row in zip(totals, rows)
                ]

            for r, total in enumerate(vectors.loop(slots, [FLOAT(0.0)] * num_rows, add_slot)):
                vectors.store(total, builder.add(sums, WIDE(4 * r)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), generate

    return add


@intrinsic
def exp_columns(context: Any, scores: Any, row_bytes: Any, length: Any, sums: Any) -> Any:
    """Replace 16 columns of float32 scores [length, 16] by e^(score - largest), and store the sum
    of each column, which is summed in the order of the rows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, row_bytes, length, sums = args
        vectors = VectorBuilder(builder)
        last = builder.sub(args[2], WIDE(1))
        part = builder.udiv(builder.add(length, WIDE(PARTS - 1)), WIDE(PARTS))

        def load_row(index: Any) -> Any:
            return vectors.load(vectors.offset(scores, builder.mul(index, row_bytes)))

        def take_largest(index: Any, values: list[Any]) -> list[Any]:
            rows = [builder.add(index, builder.mul(part, WIDE(number))) for number in range(PARTS)]
            rows = [builder.select(builder.icmp_signed("<", row, last), row, last) for row in rows]
            return [vectors.maximum(load_row(row), value) for row, value in zip(rows, values)]

        largest, *others = vectors.loop(part, [load_row(WIDE(0))] * PARTS, take_largest)
        for other in others:
            largest = vectors.maximum(largest, other)

        def exponentiate(index: Any, values: list[Any]) -> list[Any]:
            weight = vectors.exp(builder.fsub(load_row(index), largest))
            vectors.store(weight, vectors.offset(scores, builder.mul(index, row_bytes)))
            return [builder.fadd(values[0], weight)]

        (total,) = vectors.loop(length, [vectors.constant(0.0)], exponentiate)
        vectors.store(total, sums)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate
