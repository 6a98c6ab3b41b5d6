"""Puts the rows of a GGUF file's quantised weights into panels of 16 outputs (`block_formats`),
compiled by Numba: it takes a third of the time in which a disk reads them.

Eight integers of an output are the bytes of a word of 64 bits, from which four bytes of a line are
joined.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from llvmlite import ir
from numba import carray, types
from torch import Tensor

from .block_formats import BLOCK, COLUMNS, LINE, BlockFormat
from .vectors import (
    WIDE,
    WORD,
    compile_inline,
    compile_unlocked,
    intrinsic,
    to_bytes,
)

Type = gguf.GGMLQuantizationType

# Numba compiles numbers of a module into the code.
Q4_0 = int(Type.Q4_0)
Q4_1 = int(Type.Q4_1)
Q5_0 = int(Type.Q5_0)
Q8_0 = int(Type.Q8_0)
Q4_K = int(Type.Q4_K)
Q6_K = int(Type.Q6_K)
LOW_HALVES = np.uint64(0x0F0F0F0F0F0F0F0F)
LOW_PAIRS = np.uint64(0x0303030303030303)
LOW_BITS = np.uint64(0x0101010101010101)
DIAGONAL = np.uint64(0x8040201008040201)
ALL_BUT_TOP = np.uint64(0x7F7F7F7F7F7F7F7F)
BYTE = np.uint64(0xFF)


@intrinsic
def load_eight(context: Any, address: Any) -> Any:
    """Return the eight bytes at an address as a word of 64 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], WIDE.as_pointer()), align=1)

    return types.uint64(types.int64), generate


@intrinsic
def store_four(context: Any, address: Any, word: Any) -> Any:
    """Store the low 32 bits of a word at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.PointerType(WORD))
        builder.store(builder.trunc(args[1], WORD), pointer, align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64), generate


@compile_inline
def order_bytes(word: Any) -> Any:
    """Return the bytes 0, 4, 1 and 5 of a word, the order of an output's bytes in a line."""
    first = (word & BYTE) | ((word >> np.uint64(24)) & np.uint64(0xFF00))
    second = ((word & np.uint64(0xFF00)) << np.uint64(8)) | (
        (word >> np.uint64(16)) & np.uint64(0xFF000000)
    )
    return first | second


@compile_inline
def store_low(eight: Any, address: int) -> None:
    """Store the low four bits of eight integers in a line."""
    store_four(address, order_bytes(eight | (eight >> np.uint64(12))))


@compile_inline
def join_high(eight: Any, bits: int, fours: int) -> Any:
    """Return the further bits of eight integers where a line has those of its eighth `fours`."""
    joined = order_bytes(eight | (eight >> np.uint64(16 - bits)))
    return joined << np.uint64(2 * bits * fours)


@compile_inline
def pack_nibbles(source: int, count: int, address: int) -> None:
    """Store the low halves of bytes, and behind them the high halves, in lines."""
    for eight in range(count // 8):
        content = load_eight(source + 8 * eight)
        store_low(content & LOW_HALVES, address + LINE * eight)
        high = (content >> np.uint64(4)) & LOW_HALVES
        store_low(high, address + LINE * (count // 8 + eight))


@compile_inline
def pack_single_bits(source: int, address: int) -> None:
    """Store 32 bits, one of each integer, in a line."""
    content = load_eight(source)
    line = np.uint64(0)
    for eight in range(4):
        # Bit n of a byte becomes byte n.
        spread = (((content >> np.uint64(8 * eight)) & BYTE) * LOW_BITS) & DIAGONAL
        bits = ((spread + ALL_BUT_TOP) >> np.uint64(7)) & LOW_BITS
        line |= join_high(bits, 1, eight)
    store_four(address, line)


@compile_inline
def pack_bytes(source: int, address: int) -> None:
    """Store 32 integers of eight bits in lines."""
    for eight in range(4):
        content = load_eight(source + 8 * eight)
        store_four(address + 2 * LINE * eight, order_bytes(content))
        store_four(address + 2 * LINE * eight + LINE, order_bytes(content >> np.uint64(16)))


@compile_inline
def pack_six_bits(source: int, address: int, block_bytes: int) -> None:
    """Store the 256 integers of a block of Q6_K in the lines of eight blocks."""
    for block in range(8):
        half = block // 4
        part = block % 4
        start = address + block * block_bytes
        low = source + 64 * half + BLOCK * (part % 2)
        high = source + 128 + BLOCK * half
        line = np.uint64(0)
        for eight in range(4):
            content = load_eight(low + 8 * eight) >> np.uint64(4 * (part // 2))
            # A line of two further bits precedes two lines of four bits.
            pair = start + 3 * LINE * (eight // 2)
            store_low(content & LOW_HALVES, pair + LINE * (1 + eight % 2))
            pairs = (load_eight(high + 8 * eight) >> np.uint64(2 * part)) & LOW_PAIRS
            joined = join_high(pairs, 2, eight % 2)
            line = joined if eight % 2 == 0 else line | joined
            if eight % 2 == 1:
                store_four(pair, line)


@compile_inline
def pack_integers(kind: int, source: int, address: int, block_bytes: int) -> None:
    """Store the integers of a block of a file, at an address, as those of an output of a panel."""
    if kind == Q4_K:
        for part in range(4):
            start = address + 2 * part * block_bytes
            for eight in range(4):
                content = load_eight(source + 16 + BLOCK * part + 8 * eight)
                store_low(content & LOW_HALVES, start + LINE * eight)
                high = (content >> np.uint64(4)) & LOW_HALVES
                store_low(high, start + block_bytes + LINE * eight)
    elif kind == Q6_K:
        pack_six_bits(source, address, block_bytes)
    elif kind == Q8_0:
        pack_bytes(source + 2, address)
    elif kind == Q5_0:
        pack_single_bits(source + 2, address)
        pack_nibbles(source + 6, BLOCK // 2, address + LINE)
    else:
        pack_nibbles(source + (4 if kind == Q4_1 else 2), BLOCK // 2, address)


@compile_inline
def pack_scales(kind: int, source: Any, scales: Any, out: int) -> None:
    """Store the scales of a block of a file as those of an output of a group."""
    halves = 2 if kind in (Q4_1, Q4_K) else 1
    scale_byte = 208 if kind == Q6_K else 0
    for half in range(halves):
        for byte in range(2):
            scales[2 * COLUMNS * half + 2 * out + byte] = source[scale_byte + 2 * half + byte]
    parts = 2 * COLUMNS * halves + out
    if kind == Q6_K:
        for part in range(16):
            scales[parts + COLUMNS * part] = source[192 + part]
    elif kind == Q4_K:
        minima = parts + 8 * COLUMNS
        for part in range(4):
            low = source[4 + part]
            middle = source[8 + part]
            high = source[12 + part]
            scales[parts + COLUMNS * part] = low & 63
            scales[parts + COLUMNS * (4 + part)] = (high & 15) | ((low >> 2) & 48)
            scales[minima + COLUMNS * part] = middle & 63
            scales[minima + COLUMNS * (4 + part)] = (high >> 4) | ((middle >> 2) & 48)


@compile_unlocked
def pack_rows(
    kind: int,
    group_blocks: int,
    block_bytes: int,
    scale_bytes: int,
    file_bytes: int,
    groups: int,
    rows: int,
    num_panels: int,
    panels: int,
) -> None:
    """Store rows of a file, whose blocks have `file_bytes`, as panels, of whose groups scales and
    every block have so many bytes; both are given by their addresses.
    """
    group_bytes = scale_bytes + group_blocks * block_bytes
    for number in range(num_panels):
        panel = panels + number * groups * group_bytes
        for out in range(COLUMNS):
            row = rows + (COLUMNS * number + out) * groups * file_bytes
            for group in range(groups):
                source = row + group * file_bytes
                scales = panel + group * group_bytes
                pack_integers(kind, source, scales + scale_bytes + 4 * out, block_bytes)
                pack_scales(
                    kind,
                    carray(to_bytes(source), (file_bytes,)),
                    carray(to_bytes(scales), (scale_bytes,)),
                    out,
                )


def pack_panels(content: Tensor, block_format: BlockFormat, out: Tensor) -> None:
    """Store rows of a file [O, bytes] as panels [O / 16, panel bytes]; O is a multiple of 16."""
    file_bytes = gguf.GGML_QUANT_SIZES[block_format.tensor_type][1]
    content = content.contiguous()
    pack_rows(
        int(block_format.tensor_type),
        block_format.group_blocks,
        block_format.block_bytes,
        block_format.scale_bytes,
        file_bytes,
        content.shape[1] // file_bytes,
        content.data_ptr(),
        len(out),
        out.data_ptr(),
    )
