"""The values of the blocks in which GGUF files store weights.

The values have the bits of `gguf.dequantize`, which takes three times as long. Types that few
files use are left to it. Shapes: N blocks, S bytes of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import torch
from torch import Tensor

Type = gguf.GGMLQuantizationType


def dequantize(content: Tensor, tensor_type: Any) -> Tensor:
    """Return the float32 values of bytes that hold whole blocks of a type."""
    if tensor_type in PLAIN_TYPES:
        return content.view(PLAIN_TYPES[tensor_type]).float()
    if tensor_type not in BLOCK_VALUES:
        return torch.from_numpy(gguf.dequantize(content.numpy(), tensor_type)).reshape(-1)
    block_bytes = gguf.GGML_QUANT_SIZES[tensor_type][1]
    return BLOCK_VALUES[tensor_type](content.view(-1, block_bytes)).reshape(-1)


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 numbers at a byte of every block, [N, S] -> float32 [N, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return the low halves of bytes and then their high halves, [N, S] -> [N, 2S]."""
    return torch.cat([packed & 15, packed >> 4], dim=1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8)
    high = ((blocks[:, 2:6, None] >> shifts) & 1).flatten(1)  # [N, 32]
    values = _nibbles(blocks[:, 6:]) | (high << 4)
    return _half(blocks, 0) * (values.float() - 16)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def _q4_k(blocks: Tensor) -> Tensor:
    """Eight groups of 32 values with scales and minima of six bits each."""
    low, middle, high = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scales = torch.cat([low & 63, (high & 15) | ((low >> 2) & 48)], dim=1)
    minima = torch.cat([middle & 63, (high >> 4) | ((middle >> 2) & 48)], dim=1)
    scales = _half(blocks, 0) * scales.float()  # [N, 8]
    minima = _half(blocks, 2) * minima.float()
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    values = torch.stack([packed & 15, packed >> 4], dim=2).view(-1, 8, 32)
    return values.float().mul_(scales[..., None]).sub_(minima[..., None])


def _q6_k(blocks: Tensor) -> Tensor:
    """Sixteen groups of 16 values with scales of eight bits each."""
    low = blocks[:, :128].reshape(-1, 2, 64)
    low = torch.stack([low & 15, low >> 4], dim=2).view(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    high = torch.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2)
    values = (low | (high << 4)).view(torch.int8) - 32  # [N, 2, 4, 32]
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return values.view(-1, 16, 16).float().mul_(scales[..., None])


PLAIN_TYPES = {
    Type.F64: torch.float64,
    Type.F32: torch.float32,
    Type.F16: torch.float16,
    Type.BF16: torch.bfloat16,
}
BLOCK_VALUES: dict[Any, Callable[[Tensor], Tensor]] = {
    Type.Q4_0: _q4_0,
    Type.Q4_1: _q4_1,
    Type.Q5_0: _q5_0,
    Type.Q8_0: _q8_0,
    Type.Q4_K: _q4_k,
    Type.Q6_K: _q6_k,
}
"""Computes the values of blocks [N, S]."""
