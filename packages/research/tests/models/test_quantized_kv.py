"""Few bits: how far numbers are off, and what they take."""

import pytest
import torch
from torch import nn

from spectrain_research.less_cache.quantized_kv import (
    MIN_SCALE,
    RANGE_MARGIN,
    Bits,
    QuantizedLinear,
    quantize_groups,
)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [1, 7, 32])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_quantized_keys_are_rounded_to_half_a_step(bits: Bits, size: int, scale: float) -> None:
    """Every number lies within half a step, and a step is what the group's range over its levels
    allows.
    """
    numbers = scale * (torch.randn(5, 3, size) + torch.randn(5, 3, 1))
    numbers[0] = numbers[0, 0, 0]  # all alike
    codes = quantize_groups(numbers, bits)
    step = codes.scale.float()
    assert (
        (codes.dequantize(torch.float32) - numbers).abs()
        <= step * 0.5 * (1 + 1e-3) + 1e-6 * numbers.abs()
    ).all()
    spread = numbers.amax(-1) - numbers.amin(-1)
    levels = (1 << bits) - 1
    allowed = (spread + 2 * RANGE_MARGIN * numbers.abs().amax(-1)) * (
        1 + 2 * RANGE_MARGIN
    ) / levels + MIN_SCALE
    assert (step[..., 0] <= allowed).all()


@pytest.mark.parametrize(("bits", "bytes_a_number"), [(8, 1.0), (4, 0.5)])
def test_quantized_keys_take_the_stated_bytes(bits: Bits, bytes_a_number: float) -> None:
    """A number takes its bits, and a group four bytes more."""
    codes = quantize_groups(torch.randn(6, 32), bits)
    assert codes.nbytes == 6 * (32 * bytes_a_number + 4)


def test_a_coded_linear_multiplies_by_its_codes() -> None:
    """The product is that of the dequantized weight, and the bias is unchanged."""
    linear = nn.Linear(64, 5)
    rows = torch.randn(3, 64)
    coded = QuantizedLinear(linear, 4)
    weight = coded.weight.dequantize(torch.float32).flatten(-2)
    assert coded.weight.codes.shape == (5, 2, 16)  # groups of 32
    assert (weight - linear.weight).abs().max() < 0.02
    torch.testing.assert_close(coded(rows), rows @ weight.T + linear.bias)
