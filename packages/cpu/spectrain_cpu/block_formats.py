"""How quantised weights of GGUF files lie in memory for products: their blocks in panels of 16
outputs. Nothing is rounded; a panel has the bits of the file in another order.

Shapes: O output width, K input width, P panels (O / 16), B blocks of 32 inputs (K / 32), G groups
of blocks that share a scale of 16 bits.

A panel begins with the integers of its blocks. 16 outputs by two inputs are a vector of 32 words of
16 bits, so a block is 16 vectors. Word w of line j of a block holds four bits of each of the
vectors 4 j to 4 j + 3; further bits, and integers of eight bits, follow in lines of their own. Then
come the scales of all groups, 16 numbers after each other: float16 scales, float16 minima, and in
the types with groups of eight blocks the small integers by which these are multiplied.

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
GROUP_BLOCKS = 8  # of the types whose blocks have 256 values
VALUES_AT_ONCE = 1 << 18  # that are packed at once, so that they stay in a processor's cache


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
    def group_bytes(self) -> int:
        """Bytes of the scales of a group of 16 outputs."""
        numbers = 2 if self.has_minimum else 1
        return COLUMNS * numbers * (2 + self.scale_parts)

    def panel_bytes(self, width: int) -> int:
        """Return the bytes of a panel over an input width, with its scales."""
        blocks = width // BLOCK
        return blocks * self.block_bytes + blocks // self.group_blocks * self.group_bytes


FORMATS: dict[Any, BlockFormat] = {
    Type.Q4_0: BlockFormat(Type.Q4_0, 4, 0, 8, 1, 0, False),
    Type.Q4_1: BlockFormat(Type.Q4_1, 4, 0, 0, 1, 0, True),
    Type.Q5_0: BlockFormat(Type.Q5_0, 4, 1, 16, 1, 0, False),
    Type.Q8_0: BlockFormat(Type.Q8_0, 8, 0, 0, 1, 0, False),
    Type.Q4_K: BlockFormat(Type.Q4_K, 4, 0, 0, GROUP_BLOCKS, GROUP_BLOCKS, True),
    Type.Q6_K: BlockFormat(Type.Q6_K, 4, 2, 32, GROUP_BLOCKS, 2 * GROUP_BLOCKS, False),
}


@dataclass(frozen=True)
class BlockParts:
    """The numbers of blocks, by output: integers [O, K] in bytes, float16 scales and minima [O, G],
    and the integers by which those are multiplied [O, G, n] in bytes. What a type lacks is empty.
    """

    integers: Tensor
    scales: Tensor
    minima: Tensor
    scale_parts: Tensor
    minimum_parts: Tensor


def split_blocks(content: Tensor, block_format: BlockFormat) -> BlockParts:
    """Return the numbers of rows of a file [O, bytes]."""
    outputs = len(content)
    size = gguf.GGML_QUANT_SIZES[block_format.tensor_type][1]
    blocks = content.view(-1, size)
    nothing = content.new_empty(outputs, 0)
    parts = BlockParts(*SPLITTERS[block_format.tensor_type](blocks))
    return BlockParts(
        parts.integers.reshape(outputs, -1),
        parts.scales.reshape(outputs, -1),
        nothing if parts.minima is None else parts.minima.reshape(outputs, -1),
        nothing if parts.scale_parts is None else parts.scale_parts.reshape(outputs, -1),
        nothing if parts.minimum_parts is None else parts.minimum_parts.reshape(outputs, -1),
    )


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 numbers at a byte of every block, [N, S] -> [N, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    return torch.cat([packed & 15, packed >> 4], dim=1)


def _split_q4_0(blocks: Tensor) -> tuple[Any, ...]:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0), None, None, None


def _split_q4_1(blocks: Tensor) -> tuple[Any, ...]:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2), None, None


def _split_q5_0(blocks: Tensor) -> tuple[Any, ...]:
    shifts = torch.arange(8, dtype=torch.uint8)
    high = ((blocks[:, 2:6, None] >> shifts) & 1).flatten(1)
    return _nibbles(blocks[:, 6:]) | (high << 4), _half(blocks, 0), None, None, None


def _split_q8_0(blocks: Tensor) -> tuple[Any, ...]:
    return blocks[:, 2:], _half(blocks, 0), None, None, None


def _split_q4_k(blocks: Tensor) -> tuple[Any, ...]:
    low, middle, high = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scales = torch.cat([low & 63, (high & 15) | ((low >> 2) & 48)], dim=1)
    minima = torch.cat([middle & 63, (high >> 4) | ((middle >> 2) & 48)], dim=1)
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    integers = torch.stack([packed & 15, packed >> 4], dim=2)
    return integers.flatten(1), _half(blocks, 0), _half(blocks, 2), scales, minima


def _split_q6_k(blocks: Tensor) -> tuple[Any, ...]:
    low = blocks[:, :128].reshape(-1, 2, 64)
    low = torch.stack([low & 15, low >> 4], dim=2).view(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    high = torch.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2)
    integers = (low | (high << 4)).flatten(1)
    return integers, _half(blocks, 208), None, blocks[:, 192:208], None


SPLITTERS: dict[Any, Any] = {
    Type.Q4_0: _split_q4_0,
    Type.Q4_1: _split_q4_1,
    Type.Q5_0: _split_q5_0,
    Type.Q8_0: _split_q8_0,
    Type.Q4_K: _split_q4_k,
    Type.Q6_K: _split_q6_k,
}


def pack_panels(content: Tensor, width: int, block_format: BlockFormat, out: Tensor) -> None:
    """Store rows of a file [O, bytes] as panels [O / 16, panel bytes]; O is a multiple of 16."""
    step = max(1, VALUES_AT_ONCE // (COLUMNS * width))
    for first in range(0, len(out), step):
        rows = content[first * COLUMNS : (first + step) * COLUMNS]
        _pack(split_blocks(rows, block_format), block_format, out[first : first + step])


def _pack(parts: BlockParts, block_format: BlockFormat, out: Tensor) -> None:
    panels = len(out)
    blocks = parts.integers.shape[1] // BLOCK
    # [P, outputs, B, vectors, inputs of a vector]
    vectors = parts.integers.view(panels, COLUMNS, blocks, VECTORS, 2)
    vectors = vectors.permute(0, 2, 3, 1, 4).contiguous()  # [P, B, 16, outputs, 2]
    end = blocks * block_format.block_bytes
    integers = out[:, :end].view(panels, blocks, block_format.block_bytes)
    if block_format.low_bits == 8:
        _as_words(integers).copy_(_join_fields(_order_fields(vectors, 8), 8).flatten(2))
    else:
        words = (vectors & 15).view(panels, blocks, 4, 4, COLUMNS, 2)
        low = _join_fields(words, 4).flatten(2)
        _as_words(integers)[..., : low.shape[-1]].copy_(low)
        bits = block_format.high_bits
        if bits:
            words = _order_fields(vectors >> 4, bits)
            _as_words(integers)[..., low.shape[-1] :].copy_(_join_fields(words, bits).flatten(2))
    _pack_scales(parts, block_format, out[:, end:])


def _order_fields(vectors: Tensor, bits: int) -> Tensor:
    """Return vectors [P, B, 16, ..] by the lines and fields that hold so many bits of them, [P, B,
    lines, fields, ..]: the fields of a low byte, and then those of a high one.
    """
    panels, blocks, _, *rest = vectors.shape
    if bits == 8:
        # [.., lines of four bits, bytes, fields of a byte]
        return vectors.view(panels, blocks, 4, 2, 2, *rest).transpose(3, 4).flatten(2, 3)
    fours = vectors.view(panels, blocks, bits, 4 // bits, 2, 2, *rest)
    return fours.transpose(3, 4).flatten(3, 5)


def _restore_order(fields: Tensor, bits: int) -> Tensor:
    """Return the vectors [P, B, 16, ..] of lines and fields, the inverse of `_order_fields`."""
    panels, blocks, _, _, *rest = fields.shape
    if bits == 8:
        bytes_last = fields.reshape(panels, blocks, 4, 2, 2, *rest)
        return bytes_last.transpose(3, 4).reshape(panels, blocks, VECTORS, *rest)
    by_byte = fields.reshape(panels, blocks, bits, 2, 4 // bits, 2, *rest)
    return by_byte.transpose(3, 4).reshape(panels, blocks, VECTORS, *rest)


def _as_words(content: Tensor) -> Tensor:
    return content.view(torch.int16)


def _join_fields(fields: Tensor, bits: int) -> Tensor:
    """Return words of 16 bits, each of the fields [.., n, outputs, 2] of so many bits."""
    count = fields.shape[-3]
    joined = fields.select(-3, 0).to(torch.int16)
    for index in range(1, count):
        joined |= fields.select(-3, index).to(torch.int16) << (bits * index)
    return joined


def _pack_scales(parts: BlockParts, block_format: BlockFormat, out: Tensor) -> None:
    """Store the scales of every group, 16 outputs side by side."""
    panels = len(out)
    groups = parts.scales.shape[1]
    out = out.view(panels, groups, block_format.group_bytes)
    start = 0
    for numbers in (parts.scales, parts.minima, parts.scale_parts, parts.minimum_parts):
        if numbers.numel():
            # [P, outputs, G, n] -> [P, G, n, outputs]
            ordered = numbers.view(panels, COLUMNS, groups, -1).permute(0, 2, 3, 1).contiguous()
            content = ordered.view(torch.uint8).flatten(2)
            out[..., start : start + content.shape[-1]] = content
            start += content.shape[-1]


def unpack_panels(panels: Tensor, width: int, block_format: BlockFormat) -> Tensor:
    """Return the float32 values [O, K] of panels [P, bytes], with the bits of
    `gguf.dequantize`.
    """
    count = len(panels)
    blocks = width // BLOCK
    end = blocks * block_format.block_bytes
    integers = panels[:, :end].contiguous().view(count, blocks, block_format.block_bytes)
    values = _unpack_integers(integers, block_format) - block_format.offset
    groups = blocks // block_format.group_blocks
    numbers = panels[:, end:].contiguous().view(count, groups, block_format.group_bytes)
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
        low_words = 4 * COLUMNS * 2
        fields = _split_fields(words[..., :low_words], 4)
        vectors = fields.reshape(count, blocks, VECTORS, COLUMNS, 2)
        bits = block_format.high_bits
        if bits:
            high = _split_fields(words[..., low_words:], bits)
            vectors = vectors | (_restore_order(high, bits) << 4)
    return vectors.permute(0, 3, 1, 2, 4).reshape(count, COLUMNS, blocks * BLOCK).float()


def _split_fields(words: Tensor, bits: int) -> Tensor:
    """Return the fields of words [P, B, n] of 16 bits, [P, B, lines, fields, outputs, 2]."""
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
