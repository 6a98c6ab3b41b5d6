"""The values of quantised blocks are those of the library that defines them, bit by bit."""

import gguf
import numpy as np
import pytest
import torch

from spectrain.models.gguf_blocks import BLOCK_VALUES, dequantize

Type = gguf.GGMLQuantizationType
HALVES = {Type.Q4_0: (0,), Type.Q4_1: (0, 2), Type.Q5_0: (0,), Type.Q8_0: (0,), Type.Q4_K: (0, 2),
    Type.Q6_K: (208,), Type.Q5_K: (0, 2)}  # fmt: skip
"""The bytes of a block where a float16 begins."""


@pytest.mark.parametrize("tensor_type", HALVES, ids=lambda value: value.name)
def test_every_bit_of_a_block_counts(tensor_type: gguf.GGMLQuantizationType) -> None:
    """Random bytes, with scales that are numbers. Q5_K is one of the types left to the library."""
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (64, block_bytes), dtype=np.uint8)
    for start in HALVES[tensor_type]:
        scales = generator.normal(size=(64, 1)).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8)
    expected = torch.from_numpy(gguf.dequantize(blocks, tensor_type)).reshape(-1)
    values = dequantize(torch.from_numpy(blocks).reshape(-1), tensor_type)
    assert values.dtype == torch.float32 and values.shape == (64 * block_values,)
    assert torch.equal(values, expected) and values.unique().numel() > 100


def test_the_common_types_are_computed_here() -> None:
    assert set(BLOCK_VALUES) == set(HALVES) - {Type.Q5_K}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_that_are_no_blocks(dtype: torch.dtype) -> None:
    values = torch.randn(40).to(dtype)
    tensor_type = {torch.float32: Type.F32, torch.float16: Type.F16, torch.bfloat16: Type.BF16}
    read = dequantize(values.view(torch.uint8), tensor_type[dtype])
    assert torch.equal(read, values.float())
