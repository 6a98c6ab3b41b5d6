"""Vector code for kernels on a CPU: LLVM instructions that Numba has no names for. Importing it
imports Numba.

Numbers of a model are bfloat16, read as uint16, or float32; sums are float32. Vectors have 16
float32, or 16 words of 32 bits: each word is a float32 or a pair of bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding
import numba.extending
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

LANES = 16
WORD = ir.IntType(32)
WIDE = ir.IntType(64)
FLOAT = ir.FloatType()
VECTOR, WORDS, HALVES = (ir.VectorType(kind, LANES) for kind in (FLOAT, WORD, ir.IntType(16)))
VECTOR_BYTES = 4 * LANES
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440054690583e-4
# adding it leaves a float32 rounded to an integer, in the low bits of the sum
ROUNDER = 1.5 * 2.0**23
LOWEST = -87.0  # exp of less is below the smallest normal float32
TAYLOR_TERMS = 7  # the remainder is below 1e-8 where |x| is at most ln(2) / 2

# The inline assembly of pairs needs it.
llvmlite.binding.initialize_native_asmparser()


def compile_cached(function: Callable[..., Any]) -> Any:
    """Compile a function for the types of its first call, and keep the code on disk for later
    processes.
    """
    return numba.njit(function, error_model="numpy", cache=True)


def compile_unlocked(function: Callable[..., Any]) -> Any:
    """Compile a function that runs without Python's lock, and keep the code on disk."""
    return numba.njit(function, error_model="numpy", cache=True, nogil=True)


def compile_part(function: Callable[[int, int, int], None]) -> Callable[[], Any]:
    """Return a function that compiles this part of a job at its first call, keeps the code on disk,
    and returns it with its address."""
    return cache(
        lambda: numba.cfunc("void(int64, int64, int64)", error_model="numpy", cache=True)(function)
    )


def compile_inline(function: Callable[..., Any]) -> Any:
    """Compile a function into those that call it."""
    return numba.njit(function, error_model="numpy")


def compile_reduction(function: Callable[..., Any]) -> Any:
    """Compile a function into those that call it, with sums in any order, so that they are made
    in vectors.
    """
    return numba.njit(function, error_model="numpy", fastmath={"reassoc", "nsz", "nnan"})


def intrinsic(function: Callable[..., Any]) -> Any:
    """Make a function of types, which returns a signature and what emits its code, into one of
    values.
    """
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


to_halves = make_pointer(types.uint16)
to_floats = make_pointer(types.float32)
to_bytes = make_pointer(types.uint8)
to_words = make_pointer(types.int32)
to_longs = make_pointer(types.int64)


@intrinsic
def advance(context: Any, pointer: Any, count: Any) -> Any:
    """Return the pointer `count` numbers after this one."""
    return pointer(pointer, types.int64), lambda context, builder, signature, args: builder.gep(
        args[0], [args[1]]
    )


@intrinsic
def as_words(context: Any, pointer: Any) -> Any:
    """Return a pointer to numbers of a model as one to words of 32 bits."""
    signature = types.CPointer(types.int32)(pointer)
    return signature, lambda context, builder, signature, args: builder.bitcast(
        args[0], WORD.as_pointer()
    )


@intrinsic
def count_words(context: Any, pointer: Any, count: Any) -> Any:
    """Return the words of 32 bits that `count` numbers of a model take."""
    shift = WIDE(1 if pointer.dtype == types.uint16 else 0)
    return types.int64(
        pointer, types.int64
    ), lambda context, builder, signature, args: builder.lshr(args[1], shift)


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
    return types.int32(types.float32), lambda context, builder, signature, args: builder.bitcast(
        args[0], WORD
    )


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
    done = builder.append_basic_block()
    cases = builder.switch(number, blocks[-1])
    for value, block in enumerate(blocks, start=1):
        cases.add_case(WIDE(value), block)
        builder.position_at_end(block)
        emit(value)
        builder.branch(done)
    builder.position_at_end(done)


def emit_fetch(builder: Any, address: Any, locality: int) -> None:
    """Fetch the line of an address, into the second-level cache by a locality of 2, and into the
    first by 3.
    """
    byte_pointer = ir.IntType(8).as_pointer()
    fetch_type = ir.FunctionType(ir.VoidType(), [byte_pointer, WORD, WORD, WORD])
    fetch = cgutils.get_or_insert_function(builder.module, fetch_type, "llvm.prefetch.p0")
    builder.call(fetch, [builder.inttoptr(address, byte_pointer), WORD(0), WORD(locality), WORD(1)])


class VectorBuilder:
    """Emits vector instructions at the position of an LLVM builder. Addresses are integers."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        product = ir.FunctionType(VECTOR, [VECTOR] * 3)
        self.fused = cgutils.get_or_insert_function(
            builder.module, product, f"llvm.fma.v{LANES}f32"
        )

    def offset(self, base: Any, index: Any, size: int = 1) -> Any:
        """Return the address of element `index` of elements of `size` bytes."""
        return self.builder.add(base, self.builder.mul(index, WIDE(size)))

    def load(self, address: Any, kind: Any = VECTOR) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=2)

    def store(self, value: Any, address: Any, align: int = 4) -> None:
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        self.builder.store(value, pointer, align=align)

    def load_repeated(self, address: Any, kind: Any = FLOAT) -> Any:
        """Return a number in every lane."""
        return self.repeat(self.load(address, kind))

    def load_widened(self, address: Any, is_half: bool) -> Any:
        """Return 16 numbers of a model as float32."""
        if not is_half:
            return self.load(address)
        return self.widen_low(self.builder.zext(self.load(address, HALVES), WORDS))

    def narrow(self, numbers: Any) -> Any:
        """Return 16 float32 as the nearest bfloat16, ties to even, as 16 numbers of 16 bits."""
        builder = self.builder
        bits = builder.bitcast(numbers, WORDS)
        last = builder.and_(builder.lshr(bits, _words(16)), _words(1))
        rounded = builder.add(builder.add(bits, _words(0x7FFF)), last)
        rounded = builder.lshr(rounded, _words(16))
        is_number = builder.fcmp_ordered("ord", numbers, numbers)
        return builder.trunc(builder.select(is_number, rounded, _words(0x7FC0)), HALVES)

    def repeat(self, number: Any) -> Any:
        vector = ir.VectorType(number.type, LANES)
        first = self.builder.insert_element(ir.Constant(vector, ir.Undefined), number, WORD(0))
        return self.builder.shuffle_vector(
            first, ir.Constant(vector, ir.Undefined), ir.Constant(WORDS, [0] * LANES)
        )

    def constant(self, number: float) -> Any:
        return ir.Constant(VECTOR, [number] * LANES)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.call(self.fused, [a, b, c])

    def multiply_pairs(self, a: Any, b: Any, sums: Any) -> Any:
        """Add to every sum the products of two bfloat16, one after the other."""
        if has_pair_products():
            kind = ir.FunctionType(VECTOR, [VECTOR, WORDS, WORDS])
            return self.builder.call(
                ir.InlineAsm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", side_effect=False),
                [sums, a, b],
            )
        sums = self.multiply_add(self.widen_high(a), self.widen_high(b), sums)
        return self.multiply_add(self.widen_low(a), self.widen_low(b), sums)

    def multiply_words(self, a: Any, b: Any, sums: Any) -> Any:
        """Add to every sum the product of two float32, given as words."""
        return self.multiply_add(
            self.builder.bitcast(a, VECTOR), self.builder.bitcast(b, VECTOR), sums
        )

    def widen_low(self, words: Any) -> Any:
        return self.builder.bitcast(
            self.builder.shl(words, ir.Constant(WORDS, [16] * LANES)), VECTOR
        )

    def widen_high(self, words: Any) -> Any:
        return self.builder.bitcast(
            self.builder.and_(words, ir.Constant(WORDS, [0xFFFF0000] * LANES)), VECTOR
        )

    def exp(self, x: Any) -> Any:
        """Return e^x of numbers up to 0, to the last bits: 2^n e^r with r = x - n ln(2), by the
        Taylor series. Below LOWEST it is 0."""
        builder = self.builder
        rounded = self.multiply_add(x, self.constant(1 / math.log(2)), self.constant(ROUNDER))
        n = builder.fsub(rounded, self.constant(ROUNDER))
        r = self.multiply_add(n, self.constant(-LN2_HIGH), x)
        r = self.multiply_add(n, self.constant(-LN2_LOW), r)
        series = self.constant(1 / math.factorial(TAYLOR_TERMS))
        for term in reversed(range(TAYLOR_TERMS)):
            series = self.multiply_add(series, r, self.constant(1 / math.factorial(term)))
        exponent = builder.shl(builder.bitcast(rounded, WORDS), ir.Constant(WORDS, [23] * LANES))
        scaled = builder.bitcast(builder.add(builder.bitcast(series, WORDS), exponent), VECTOR)
        return builder.select(
            builder.fcmp_ordered(">", x, self.constant(LOWEST)), scaled, self.constant(0.0)
        )

    def maximum(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def reduce_maximum(self, vector: Any) -> Any:
        """Return the largest number of a vector."""
        half = LANES // 2
        while half:
            lanes = ir.Constant(WORDS, [(lane + half) % LANES for lane in range(LANES)])
            vector = self.maximum(vector, self.builder.shuffle_vector(vector, vector, lanes))
            half //= 2
        return self.builder.extract_element(vector, WORD(0))

    def transpose(self, rows: list[Any]) -> list[Any]:
        """Return the columns of 16 vectors of words: each of four steps exchanges halves, of one
        number to eight.
        """
        size = 1
        while size < LANES:
            low = [lane if not lane & size else LANES + lane - size for lane in range(LANES)]
            high = [lane + size if not lane & size else LANES + lane for lane in range(LANES)]
            masks = [ir.Constant(WORDS, lanes) for lanes in (low, high)]
            rows = list(rows)
            for first in (row for row in range(LANES) if not row & size):
                pair = rows[first], rows[first + size]
                rows[first], rows[first + size] = (
                    self.builder.shuffle_vector(*pair, mask) for mask in masks
                )
            size *= 2
        return rows

    def loop(
        self, count: Any, initial: list[Any], step: Callable[[Any, list[Any]], list[Any]]
    ) -> list[Any]:
        """Run `step(index, values)` for every index below `count`, which is at least 1, and
        return its last values.
        """
        builder = self.builder
        before = self.builder.block
        body = builder.append_basic_block()
        done = builder.append_basic_block()
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


def _words(number: int) -> Any:
    """Return a word of 32 bits in every lane."""
    return ir.Constant(WORDS, [number] * LANES)


@cache
def has_pair_products() -> bool:
    """Return whether the processor multiplies pairs of bfloat16."""
    return bool(torch.cpu._is_avx512_bf16_supported())
