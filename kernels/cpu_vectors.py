"""Vector code for kernels on a CPU: LLVM instructions that Numba has no names for. Importing it imports Numba.

Numbers of a model are bfloat16, read as uint16, or float32; sums are float64. Vectors have 8 float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba.extending
from llvmlite import ir
from numba import types
from numba.core import cgutils

LANES = 8
WORD, WIDE, DOUBLE = ir.IntType(32), ir.IntType(64), ir.DoubleType()
VECTOR = ir.VectorType(DOUBLE, LANES)
VECTOR_BYTES = 8 * LANES
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
ROUNDER = 1.5 * 2.0**52  # adding it leaves a float64 rounded to an integer, in the low bits of the sum
LOWEST = -708.0  # exp of less is below the smallest normal float64
TAYLOR_TERMS = 13  # the remainder is below 1e-17 where |x| is at most ln(2) / 2


def compile_cached(function: Callable[..., Any]) -> Any:
    """Compile a function for the types of its first call, and keep the code on disk for later processes."""
    return numba.njit(function, error_model="numpy", cache=True)


def compile_inline(function: Callable[..., Any]) -> Any:
    """Compile a function into those that call it."""
    return numba.njit(function, error_model="numpy")


def compile_reduction(function: Callable[..., Any]) -> Any:
    """Compile a function into those that call it, with sums in any order, so that they are made in vectors."""
    return numba.njit(function, error_model="numpy", fastmath={"reassoc", "nsz", "nnan"})


def intrinsic(function: Callable[..., Any]) -> Any:
    """Make a function of types, which returns a signature and what emits its code, into one of values."""
    return numba.extending.intrinsic(function)


def make_pointer(dtype: Any) -> Any:
    """Return a function that turns an address into a pointer to numbers of this type."""

    @intrinsic
    def pointer_at(context: Any, address: Any) -> Any:
        signature = types.CPointer(dtype)(types.int64)
        return signature, lambda context, builder, signature, args: builder.inttoptr(
            args[0], context.get_value_type(signature.return_type)
        )

    return pointer_at


to_halves, to_floats = make_pointer(types.uint16), make_pointer(types.float32)
to_doubles, to_bytes = make_pointer(types.float64), make_pointer(types.uint8)
to_words, to_longs = make_pointer(types.int32), make_pointer(types.int64)


@intrinsic
def advance(context: Any, pointer: Any, count: Any) -> Any:
    """Return the pointer `count` numbers after this one."""
    return pointer(pointer, types.int64), lambda context, builder, signature, args: builder.gep(args[0], [args[1]])


@intrinsic
def widen(context: Any, number: Any) -> Any:
    """Return a number of a model as a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if number == types.float32:
            return args[0]
        bits = builder.shl(builder.zext(args[0], WORD), WORD(16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(number), generate


@intrinsic
def float_bits(context: Any, value: Any) -> Any:
    """Return the bits of a float32 as an int32."""
    return types.int32(types.float32), lambda context, builder, signature, args: builder.bitcast(args[0], WORD)


@intrinsic
def narrow(context: Any, value: Any, like: Any) -> Any:
    """Return a float32 as a number of the type of `like`: in bfloat16 the nearest, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if like == types.float32:
            return args[0]
        bits = builder.bitcast(args[0], WORD)
        last = builder.and_(builder.lshr(bits, WORD(16)), WORD(1))
        rounded = builder.lshr(builder.add(builder.add(bits, WORD(0x7FFF)), last), WORD(16))
        is_number = builder.fcmp_ordered("ord", args[0], args[0])
        return builder.trunc(builder.select(is_number, rounded, WORD(0x7FC0)), ir.IntType(16))

    return like(types.float32, like), generate


def emit_cases(builder: Any, number: Any, most: int, emit: Callable[[int], None]) -> None:
    """Emit code of its own for each value of `number` from 1 to `most`."""
    blocks = [builder.append_basic_block() for _ in range(most)]
    done, cases = builder.append_basic_block(), builder.switch(number, blocks[-1])
    for value, block in enumerate(blocks, start=1):
        cases.add_case(WIDE(value), block)
        builder.position_at_end(block)
        emit(value)
        builder.branch(done)
    builder.position_at_end(done)


def emit_fetch(builder: Any, address: Any, locality: int) -> None:
    """Fetch the line of an address, into the second-level cache by a locality of 2, and into the first by 3."""
    byte_pointer = ir.IntType(8).as_pointer()
    fetch_type = ir.FunctionType(ir.VoidType(), [byte_pointer, WORD, WORD, WORD])
    fetch = cgutils.get_or_insert_function(builder.module, fetch_type, "llvm.prefetch.p0")
    builder.call(fetch, [builder.inttoptr(address, byte_pointer), WORD(0), WORD(locality), WORD(1)])


class VectorBuilder:
    """Emits vector instructions at the position of an LLVM builder."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        product = ir.FunctionType(VECTOR, [VECTOR] * 3)
        self.fused = cgutils.get_or_insert_function(builder.module, product, f"llvm.fmuladd.v{LANES}f64")

    def address(self, base: Any, index: Any) -> Any:
        """Return the address of element `index` of float64 numbers."""
        return self.builder.add(base, self.builder.mul(index, WIDE(8)))

    def load(self, address: Any) -> Any:
        return self.builder.load(self.builder.inttoptr(address, VECTOR.as_pointer()), align=8)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, VECTOR.as_pointer()), align=8)

    def load_repeated(self, address: Any) -> Any:
        """Return a number in every lane."""
        return self.repeat(self.builder.load(self.builder.inttoptr(address, DOUBLE.as_pointer())))

    def repeat(self, number: Any) -> Any:
        undefined, index = ir.Constant(VECTOR, ir.Undefined), ir.IntType(32)
        first = self.builder.insert_element(undefined, number, index(0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(index, LANES), [0] * LANES))

    def constant(self, number: float) -> Any:
        return ir.Constant(VECTOR, [number] * LANES)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.call(self.fused, [a, b, c])

    def exp(self, x: Any) -> Any:
        """Return e^x of numbers up to 0, to the last bits: 2^n e^r with r = x - n ln(2), by the Taylor series. Below LOWEST
        it is 0."""
        builder, integers = self.builder, ir.VectorType(WIDE, LANES)
        rounded = self.multiply_add(x, self.constant(1 / math.log(2)), self.constant(ROUNDER))
        n = builder.fsub(rounded, self.constant(ROUNDER))
        r = self.multiply_add(n, self.constant(-LN2_HIGH), x)
        r = self.multiply_add(n, self.constant(-LN2_LOW), r)
        series = self.constant(1 / math.factorial(TAYLOR_TERMS))
        for term in reversed(range(TAYLOR_TERMS)):
            series = self.multiply_add(series, r, self.constant(1 / math.factorial(term)))
        exponent = builder.shl(builder.bitcast(rounded, integers), ir.Constant(integers, [52] * LANES))
        scaled = builder.bitcast(builder.add(builder.bitcast(series, integers), exponent), VECTOR)
        return builder.select(builder.fcmp_ordered(">", x, self.constant(LOWEST)), scaled, self.constant(0.0))

    def maximum(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def loop(self, count: Any, initial: list[Any], step: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """Run `step(index, values)` for every index below `count`, which is at least 1, and return its last values."""
        builder, before = self.builder, self.builder.block
        body, done = builder.append_basic_block(), builder.append_basic_block()
        builder.branch(body)
        builder.position_at_end(body)
        index = builder.phi(WIDE)
        phis = [builder.phi(value.type) for value in initial]
        after = [builder.add(index, WIDE(1)), *step(index, phis)]
        for phi, first, last in zip([index, *phis], [WIDE(0), *initial], after):
            phi.add_incoming(first, before)
            phi.add_incoming(last, builder.block)
        builder.cbranch(builder.icmp_signed("<", after[0], count), body, done)
        builder.position_at_end(done)
        return after[1:]


def make_product(num_rows: int, num_vectors: int) -> Any:
    """Return a function that adds a matrix product to C [rows, 8 vectors], in float64, each number summed in the order of i.

    C[r, :] += sum over i of A[r, i] B[i, :]. Arguments: the address of A and its strides along r and i, those of B along i and
    of C along r, in numbers, and the number of i, at least 1.
    """

    @intrinsic
    def multiply(context: Any, a: Any, a_row: Any, a_column: Any, b: Any, b_row: Any, c: Any, c_row: Any, length: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            a, a_row, a_column, b, b_row, c, c_row, length = args
            vectors, columns = VectorBuilder(builder), range(num_vectors)
            starts = [vectors.address(c, builder.mul(c_row, WIDE(r))) for r in range(num_rows)]
            outputs = [builder.add(start, WIDE(VECTOR_BYTES * j)) for start in starts for j in columns]

            def step(i: Any, sums: list[Any]) -> list[Any]:
                start = vectors.address(b, builder.mul(i, b_row))
                parts = [vectors.load(builder.add(start, WIDE(VECTOR_BYTES * j))) for j in columns]
                first = builder.mul(i, a_column)
                rows = [builder.add(first, builder.mul(a_row, WIDE(r))) for r in range(num_rows)]
                factors = [vectors.load_repeated(vectors.address(a, row)) for row in rows]
                return [
                    vectors.multiply_add(factors[r], parts[j], sums[r * num_vectors + j])
                    for r in range(num_rows)
                    for j in columns
                ]

            for total, output in zip(vectors.loop(length, [vectors.load(x) for x in outputs], step), outputs):
                vectors.store(total, output)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return multiply


@intrinsic
def exp_columns(context: Any, scores: Any, row_stride: Any, length: Any, sums: Any) -> Any:
    """Replace 8 columns of float64 scores [length, 8] by e^(score - largest), and store the sum of each column, which is summed
    in the order of the rows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, row_stride, length, sums = args
        vectors = VectorBuilder(builder)

        def row(index: Any) -> Any:
            return vectors.address(scores, builder.mul(index, row_stride))

        def take_largest(index: Any, values: list[Any]) -> list[Any]:
            return [vectors.maximum(vectors.load(row(index)), values[0])]

        (largest,) = vectors.loop(length, [vectors.load(scores)], take_largest)

        def exponentiate(index: Any, values: list[Any]) -> list[Any]:
            weight = vectors.exp(builder.fsub(vectors.load(row(index)), largest))
            vectors.store(weight, row(index))
            return [builder.fadd(values[0], weight)]

        (total,) = vectors.loop(length, [vectors.constant(0.0)], exponentiate)
        vectors.store(total, sums)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate
