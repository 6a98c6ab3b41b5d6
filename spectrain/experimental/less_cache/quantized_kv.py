"""Quantization in 8 or 4 bits: the target's weights, or its keys and values, as a draft reads them.

The numbers of a group lie between its `offset` and offset + (2^bits - 1) scale: x is code * scale + offset, with an error of at
most half a scale (asymmetric rounding, as in KIVI, Liu et al., 2024, section 3). Offset and scale take 16 bits each. Shapes: O
outputs, I inputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.errors import UserError
from spectrain.models.architectures.quantized import has_dense_weight

Bits = Literal[8, 4]
RANGE_MARGIN = 2**-9  # outward margin of offset and scale, so that their rounding to 16 bits covers the group
MIN_SCALE = 2**-14  # below it 16 bits are not exact to RANGE_MARGIN
WEIGHT_GROUP_SIZE = 32  # inputs per scale in 4 bits; in 8 bits a row has one


class QuantizedGroups(NamedTuple):
    """Quantized groups along the last dimension: [.., G] numbers each, two to a byte in 4 bits."""

    codes: Tensor  # uint8
    offset: Tensor  # [.., 1] float16
    scale: Tensor
    group_size: int  # G

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self[:3])

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers [.., G]."""
        codes = self.codes
        if codes.shape[-1] != self.group_size:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)[..., : self.group_size]
        return codes.to(dtype) * self.scale.to(dtype) + self.offset.to(dtype)


def quantize_groups(numbers: Tensor, bits: Bits) -> QuantizedGroups:
    """Quantize groups [.., G]."""
    levels = (1 << bits) - 1
    low, high = numbers.aminmax(dim=-1, keepdim=True)
    low = (low - low.abs() * RANGE_MARGIN).half()
    step = ((high - low) * ((1 + RANGE_MARGIN) / levels)).clamp(min=MIN_SCALE).half()
    codes = ((numbers - low) / step).round().clamp(0, levels).to(torch.uint8)
    if bits == 4:
        pairs = F.pad(codes, (0, codes.shape[-1] % 2)).unflatten(-1, (-1, 2))
        codes = pairs[..., 0] | (pairs[..., 1] << 4)
    return QuantizedGroups(codes, low, step, numbers.shape[-1])


class QuantizedLinear:
    """The forward of a linear layer with a quantized copy of its weight [O, I]."""

    def __init__(self, linear: nn.Linear, bits: Bits) -> None:
        width = linear.in_features
        size = WEIGHT_GROUP_SIZE if bits == 4 and width % WEIGHT_GROUP_SIZE == 0 else width
        self.weight = quantize_groups(linear.weight.detach().unflatten(-1, (-1, size)), bits)
        self.bias = linear.bias

    def __call__(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.dequantize(input.dtype).flatten(-2), self.bias)


class QuantizedWeights:
    """Quantized copies of all linear layers that a draft runs: those of the decoder layers in `bits` bits, the output layer in
    8. Other modules, such as norms and embeddings, stay as they are."""

    def __init__(self, name: str, layers: Sequence[nn.Module], output: nn.Module, bits: Bits) -> None:
        linears = [child for layer in layers for child in layer.modules() if isinstance(child, nn.Linear)]
        if not linears or not all(has_dense_weight(linear) for linear in linears):
            raise UserError(
                f"drafter.weights=int{bits}: the layers of {name} have no linear weights, or not plain numbers, to round; "
                "leave it out and use drafter.cache"
            )
        self.linears: dict[nn.Module, QuantizedLinear] = {linear: QuantizedLinear(linear, bits) for linear in linears}
        if isinstance(output, nn.Linear) and has_dense_weight(output):
            self.linears[output] = QuantizedLinear(output, 8)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedWeights:
        """Return the same weights: a copied drafter runs the same target."""
        return self

    def linear_overrides(self) -> Iterator[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
        """Yield each linear layer with the forward that replaces its own."""
        yield from self.linears.items()

    @property
    def tensors(self) -> list[Tensor]:
        """Return the tensors that a forward reads instead of weights."""
        return [part for linear in self.linears.values() for part in linear.weight[:3]]
