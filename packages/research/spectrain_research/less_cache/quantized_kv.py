"""Quantization in 8 or 4 bits: the target's weights, or its keys and values, as a draft reads them.

The numbers of a group lie between its `offset` and offset + (2^bits - 1) scale: x is code * scale +
offset, with an error of at most half a scale (asymmetric rounding, as in KIVI, Liu et al., 2024,
section 3). Offset and scale take 16 bits each. Shapes: O outputs, I inputs of a linear layer.
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
# outward margin of offset and scale, so that their rounding to 16 bits covers the group
RANGE_MARGIN = 2**-9
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
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)[
                ..., : self.group_size
            ]
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
        self.weight = quantize_weight(linear, bits)
        self.bias = linear.bias

    def __call__(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.dequantize(input.dtype).flatten(-2), self.bias)


def quantize_weight(linear: nn.Linear, bits: Bits) -> QuantizedGroups:
    """Quantize the weight of a linear layer, [O, groups, G]."""
    width = linear.in_features
    size = WEIGHT_GROUP_SIZE if bits == 4 and width % WEIGHT_GROUP_SIZE == 0 else width
    return quantize_groups(linear.weight.detach().unflatten(-1, (-1, size)), bits)


class CodedLinear(nn.Module):
    """A linear layer that holds nothing but the codes of its weight, dequantized at every
    product.
    """

    codes: Tensor
    offset: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear, bits: Bits) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = (
            linear.in_features,
            linear.out_features,
            linear.bias,
        )
        weight = quantize_weight(linear, bits)
        self.group_size = weight.group_size
        for name, part in zip(QuantizedGroups._fields, weight[:3]):
            self.register_buffer(name, part)

    def forward(self, input: Tensor) -> Tensor:
        weight = QuantizedGroups(self.codes, self.offset, self.scale, self.group_size)
        return F.linear(input, weight.dequantize(input.dtype).flatten(-2), self.bias)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module multiplies by a weight, whatever holds it."""
    return isinstance(module, (nn.Linear, CodedLinear))


class RoundedInput:
    """The forward of a linear layer on activations in few bits: groups of as many numbers of a
    token as weights share a scale (QSpec's W4A4 with bits=4). The rounding is simulated: the
    product runs in the type of the model."""

    def __init__(self, forward: Callable[[Tensor], Tensor], bits: Bits) -> None:
        self.forward, self.bits = forward, bits

    def __call__(self, input: Tensor) -> Tensor:
        width = input.shape[-1]
        size = WEIGHT_GROUP_SIZE if width % WEIGHT_GROUP_SIZE == 0 else width
        return self.forward(
            quantize_groups(input.unflatten(-1, (-1, size)), self.bits)
            .dequantize(input.dtype)
            .flatten(-2)
        )


def round_inputs(
    layers: Sequence[nn.Module], bits: Bits
) -> Iterator[tuple[nn.Module, RoundedInput]]:
    """Yield each linear layer of these layers with its forward on activations in few bits."""
    for layer in layers:
        yield from (
            (child, RoundedInput(child.forward, bits))
            for child in layer.modules()
            if is_linear(child)
        )


class QuantizedWeights:
    """Quantized copies of all linear layers that a draft runs: those of the decoder layers in
    `bits` bits, the output layer in
    8. Other modules, such as norms and embeddings, stay as they are."""

    def __init__(
        self, name: str, layers: Sequence[nn.Module], output: nn.Module, bits: Bits
    ) -> None:
        linears = [
            child for layer in layers for child in layer.modules() if isinstance(child, nn.Linear)
        ]
        if not linears or not all(has_dense_weight(linear) for linear in linears):
            raise UserError(
                f"drafter.weights=int{bits}: the layers of {name} have no linear weights, or not "
                "plain numbers, to round; leave it out and use drafter.cache"
            )
        self.linears: dict[nn.Module, QuantizedLinear] = {
            linear: QuantizedLinear(linear, bits) for linear in linears
        }
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
