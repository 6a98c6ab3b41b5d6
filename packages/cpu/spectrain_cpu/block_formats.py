"""How quantised weights of GGUF files lie in memory for products: their blocks in panels of 16
outputs. Nothing is rounded; a panel has the bits of the file in another order.

Shapes: O output width, K input width, P panels (O / 16), B blocks of 32 inputs (K / 32), G groups
of blocks that share a scale of 16 bits.

A panel is read from its first byte to its last, so that memory is fetched as fast as it can be: its
groups lie after each other. A group begins with its scales, 16 numbers after each other: float16
scales, float16 minima, and in the types with groups of eight blocks the small integers by which
these are multiplied, and unused bytes up to a multiple of 64. Then come the integers of its blocks.
16 outputs by two inputs are a vector of 32 words of 16 bits, so a block is 16 vectors. Word w of
line j of four bits holds those of the vectors 4 j to 4 j + 3. A line of further bits precedes the
two or four lines of four bits that it serves, and integers of eight bits have two lines for four
vectors.

The low byte of a word has bits of the vectors 4 j and 4 j + 1, and its high byte those of the
vectors 4 j + 2 and 4 j + 3, whatever the type. So a mask takes 64 integers in bytes out of a line,
and those of the four bytes of an output are the inputs 0, 4, 1 and 5, or 2, 6, 3 and 7, of eight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf
import torch
from torch import Tensor

Type = gguf.GGMLQuantizationType

COLUMNS = 16  # outputs of a panel
BLOCK = 32  # inputs whose products are added as integers
VECTORS = 16  # of a block: two inputs of every output each
LINE = 64  # bytes
GROUP_BLOCKS = 8  # of the types whose blocks have 256 values


@dataclass(frozen=True)
class BlockFormat:
    """A type of quantised weights: value = scale (integer - offset) + minimum."""

    tensor_type: Any
    # Bits of an integer that lie in lines of four bits, or of eight for signed bytes.
    low_bits: int
    # Further bits of an integer.
    high_bits: int
    # Subtracted from every integer.
    offset: int
    # Blocks of 32 inputs that share a scale of 16 bits.
    group_blocks: int
    # Integers that scale a part of a group, by output: none, or one for each 32 or 16 inputs.
    scale_parts: int
    # Whether there are minima. Those of groups of eight blocks are subtracted.
    has_minimum: bool

    @property
    def block_bytes(self) -> int:
        """Bytes of the integers of a block of 16 outputs."""
        return COLUMNS * BLOCK * (self.low_bits + self.high_bits) // 8

    @property
    def lines_per_high(self) -> int:
        """Lines of four bits whose integers have their further bits in one line before them."""
        return 4 // self.high_bits

    def find_low_line(self, index: int) -> int:
        """Return which line of a block is the line `index` of four or eight bits."""
        return index + index // self.lines_per_high + 1 if self.high_bits else index

    def find_high_line(self, index: int) -> int:
        """Return which line of a block is the line `index` of further bits."""
        return index * (self.lines_per_high + 1)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a group of 16 outputs."""
        numbers = 2 if self.has_minimum else 1
        size = COLUMNS * numbers * (2 + self.scale_parts)
        # Integers begin at a line; of a single block, unused bytes would be a tenth.
        return size if self.group_blocks == 1 else -(-size // LINE) * LINE

    @property
    def group_bytes(self) -> int:
        """Bytes of a group of 16 outputs: its scales and the integers of its blocks."""
        return self.scale_bytes + self.group_blocks * self.block_bytes

    def panel_bytes(self, width: int) -> int:
        """Return the bytes of a panel over an input width, with its scales."""
        return width // (BLOCK * self.group_blocks) * self.group_bytes


FORMATS: dict[Any, BlockFormat] = {
    Type.Q4_0: BlockFormat(Type.Q4_0, 4, 0, 8, 1, 0, False),
    Type.Q4_1: BlockFormat(Type.Q4_1, 4, 0, 0, 1, 0, True),
    Type.Q5_0: BlockFormat(Type.Q5_0, 4, 1, 16, 1, 0, False),
    Type.Q8_0: BlockFormat(Type.Q8_0, 8, 0, 0, 1, 0, False),
    Type.Q4_K: BlockFormat(Type.Q4_K, 4, 0, 0, GROUP_BLOCKS, GROUP_BLOCKS, True),
    Type.Q6_K: BlockFormat(Type.Q6_K, 4, 2, 32, GROUP_BLOCKS, 2 * GROUP_BLOCKS, False),
}


def unpack_panels(panels: Tensor, width: int, block_format: BlockFormat) -> Tensor:
    """Return the float32 values [O, K] of panels [P, bytes], with the bits of
    `gguf.dequantize`.
    """
    count = len(panels)
    blocks = width // BLOCK
    groups = blocks // block_format.group_blocks
    content = panels.view(count, groups, block_format.group_bytes)
    integers = content[..., block_format.scale_bytes :].contiguous()
    integers = integers.view(count, blocks, block_format.block_bytes)
    values = _unpack_integers(integers, block_format) - block_format.offset
    numbers = content[..., : block_format.scale_bytes]
    # [P, outputs, G, parts, inputs of a part]
    values = values.view(count, COLUMNS, groups, max(1, block_format.scale_parts), -1)
    scales = _take_halves(numbers, 0)
    minima = _take_halves(numbers, 1) if block_format.has_minimum else None
    if block_format.scale_parts:
        start = 2 * COLUMNS * (2 if block_format.has_minimum else 1)
        size = COLUMNS * block_format.scale_parts
        is_signed = not block_format.has_minimum
        scales = scales * _take_integers(numbers, start, size, is_signed)
        if minima is not None:
            minima = -(minima * _take_integers(numbers, start + size, size, is_signed))
    values = values * scales[..., None]
    return (values if minima is None else values + minima[..., None]).reshape(-1, width)


def _unpack_integers(lines: Tensor, block_format: BlockFormat) -> Tensor:
    """Return the integers of lines [P, B, bytes] as float32 [P, outputs, K]."""
    count, blocks, _ = lines.shape
    words = _as_words(lines)
    if block_format.low_bits == 8:
        fields = lines.view(torch.int8).view(count, blocks, 8, COLUMNS, 2, 2).movedim(-1, 3)
        vectors = _restore_order(fields, 8)
    else:
        bits = block_format.high_bits
        by_line = words.view(count, blocks, -1, 2 * COLUMNS)
        low_lines = [block_format.find_low_line(index) for index in range(4)]
        fields = _split_fields(by_line[:, :, low_lines], 4)
        vectors = fields.reshape(count, blocks, VECTORS, COLUMNS, 2)
        if bits:
            high_lines = [block_format.find_high_line(index) for index in range(bits)]
            high = _split_fields(by_line[:, :, high_lines], bits)
            vectors = vectors | (_restore_order(high, bits) << 4)
    return vectors.permute(0, 3, 1, 2, 4).reshape(count, COLUMNS, blocks * BLOCK).float()


def _restore_order(fields: Tensor, bits: int) -> Tensor:
    """Return the vectors [P, B, 16, ..] of which lines [P, B, lines, fields, ..] hold so many bits:
    first in the fields of a low byte, and then in those of a high one.
    """
    panels, blocks, _, _, *rest = fields.shape
    if bits == 8:
        bytes_last = fields.reshape(panels, blocks, 4, 2, 2, *rest)
        return bytes_last.transpose(3, 4).reshape(panels, blocks, VECTORS, *rest)
    by_byte = fields.reshape(panels, blocks, bits, 2, 4 // bits, 2, *rest)
    return by_byte.transpose(3, 4).reshape(panels, blocks, VECTORS, *rest)


def _as_words(content: Tensor) -> Tensor:
    return content.view(torch.int16)


def _split_fields(words: Tensor, bits: int) -> Tensor:
    """Return the fields [P, B, lines, fields, outputs, 2] of lines of 32 words of 16 bits."""
    lines = words.reshape(*words.shape[:2], -1, COLUMNS, 2)
    mask = (1 << bits) - 1
    return torch.stack([(lines >> shift) & mask for shift in range(0, 16, bits)], dim=3)


def _take_halves(numbers: Tensor, index: int) -> Tensor:
    """Return float16 numbers of groups [P, G, bytes] as float32 [P, outputs, G, 1]."""
    size = 2 * COLUMNS
    halves = numbers[..., index * size : (index + 1) * size].contiguous().view(torch.float16)
    return halves.float().transpose(1, 2)[..., None]


def _take_integers(numbers: Tensor, start: int, size: int, is_signed: bool) -> Tensor:
    """Return integers of groups [P, G, bytes] as float32 [P, outputs, G, n]."""
    content = numbers[..., start : start + size].contiguous()
    content = content.view(torch.int8) if is_signed else content
    return content.view(*numbers.shape[:2], -1, COLUMNS).permute(0, 3, 1, 2).float()
