"""Numbers in 8 or 4 bits: what a draft reads of the target's weights, or of its keys and values.

Numbers of a group lie between its `low` and low + (2^bits - 1) step, each `step` apart: x is code * step + low, at most half a
step off (asymmetric rounding, as in KIVI, Liu et al., 2024, section 3). Low and step take 16 bits each.
Shapes: O outputs, I inputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.errors import UserError
from spectrain.models.quantization import has_dense_weight

Bits = Literal[8, 4]
RANGE_MARGIN = (
    2**-9
)  # how far low and step are moved outwards before they are rounded to 16 bits, so that they hold the whole group
MIN_SCALE = 2**-14  # a step below which 16 bits are not exact to SLACK
WEIGHT_GROUP_SIZE = 32  # inputs of a row that share a scale in 4 bits; in 8 the whole row does


class QuantizedGroups(NamedTuple):
    """Groups along one dimension, which comes last: [.., G] numbers each, two to a byte in 4 bits."""

    codes: Tensor  # uint8
    offset: Tensor  # [.., 1] float16
    scale: Tensor
    group_size: int  # G

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self[:3])

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[.., G] as they are read."""
        codes = self.codes
        if codes.shape[-1] != self.group_size:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)[..., : self.group_size]
        return codes.to(dtype) * self.scale.to(dtype) + self.offset.to(dtype)


def quantize_groups(numbers: Tensor, bits: Bits) -> QuantizedGroups:
    """The codes of groups [.., G]."""
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
    """The forward of a linear layer by a coded copy of its weight [O, I]."""

    def __init__(self, linear: nn.Linear, bits: Bits) -> None:
        width = linear.in_features
        size = WEIGHT_GROUP_SIZE if bits == 4 and width % WEIGHT_GROUP_SIZE == 0 else width
        self.weight = quantize_groups(linear.weight.detach().unflatten(-1, (-1, size)), bits)
        self.bias = linear.bias

    def __call__(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.dequantize(input.dtype).flatten(-2), self.bias)


class QuantizedWeights:
    """Coded copies of all linear layers of a model that a draft runs: those of its decoder layers in so many bits, its output
    layer in 8. The others, such as norms and embeddings, stay what they are."""

    def __init__(self, name: str, layers: Sequence[nn.Module], output: nn.Module, bits: Bits) -> None:
        found = [child for layer in layers for child in layer.modules() if isinstance(child, nn.Linear)]
        if not found or not all(has_dense_weight(linear) for linear in found):
            raise UserError(
                f"drafter.weights=int{bits}: the layers of {name} have no linear weights, or not plain numbers, to round; "
                "leave it out and use drafter.cache"
            )
        self.linears: dict[nn.Module, QuantizedLinear] = {linear: QuantizedLinear(linear, bits) for linear in found}
        if isinstance(output, nn.Linear) and has_dense_weight(output):
            self.linears[output] = QuantizedLinear(output, 8)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedWeights:
        """A copied drafter runs the same target."""
        return self

    def linear_overrides(self) -> Iterator[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
        """What runs in the place of which layer."""
        yield from self.linears.items()

    @property
    def tensors(self) -> list[Tensor]:
        """What a forward reads in the place of weights."""
        return [part for linear in self.linears.values() for part in linear.weight[:3]]
