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

from .quantization import is_plain_weight

Bits = Literal[8, 4]
SLACK = 2**-9  # how far low and step are moved outwards before they are rounded to 16 bits, so that they hold the whole group
LEAST = 2**-14  # a step below which 16 bits are not exact to SLACK
WEIGHTS_GROUP = 32  # inputs of a row that share a scale in 4 bits; in 8 the whole row does


class Codes(NamedTuple):
    """Groups along one dimension, which comes last: [.., G] numbers each, two to a byte in 4 bits."""

    packed: Tensor  # uint8
    low: Tensor  # [.., 1] float16
    step: Tensor
    size: int  # G

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self[:3])

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """[.., G] as they are read."""
        codes = self.packed
        if codes.shape[-1] != self.size:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)[..., : self.size]
        return codes.to(dtype) * self.step.to(dtype) + self.low.to(dtype)


def encode(numbers: Tensor, bits: Bits) -> Codes:
    """The codes of groups [.., G]."""
    levels = (1 << bits) - 1
    low, high = numbers.aminmax(dim=-1, keepdim=True)
    low = (low - low.abs() * SLACK).half()
    step = ((high - low) * ((1 + SLACK) / levels)).clamp(min=LEAST).half()
    codes = ((numbers - low) / step).round().clamp(0, levels).to(torch.uint8)
    if bits == 4:
        pairs = F.pad(codes, (0, codes.shape[-1] % 2)).unflatten(-1, (-1, 2))
        codes = pairs[..., 0] | (pairs[..., 1] << 4)
    return Codes(codes, low, step, numbers.shape[-1])


class CodedLinear:
    """The forward of a linear layer by a coded copy of its weight [O, I]."""

    def __init__(self, linear: nn.Linear, bits: Bits) -> None:
        width = linear.in_features
        size = WEIGHTS_GROUP if bits == 4 and width % WEIGHTS_GROUP == 0 else width
        self.codes = encode(linear.weight.detach().unflatten(-1, (-1, size)), bits)
        self.bias = linear.bias

    def __call__(self, input: Tensor) -> Tensor:
        return F.linear(input, self.codes.numbers(input.dtype).flatten(-2), self.bias)


class CodedWeights:
    """Coded copies of all linear layers of a model that a draft runs: those of its decoder layers in so many bits, its output
    layer in 8. The others, such as norms and embeddings, stay what they are."""

    def __init__(self, name: str, layers: Sequence[nn.Module], output: nn.Module, bits: Bits) -> None:
        found = [child for layer in layers for child in layer.modules() if isinstance(child, nn.Linear)]
        if not found or not all(is_plain_weight(linear) for linear in found):
            raise UserError(
                f"drafter.weights=int{bits}: the layers of {name} have no linear weights, or not plain numbers, to round; "
                "leave it out and use drafter.cache"
            )
        self.linears: dict[nn.Module, CodedLinear] = {linear: CodedLinear(linear, bits) for linear in found}
        if isinstance(output, nn.Linear) and is_plain_weight(output):
            self.linears[output] = CodedLinear(output, 8)

    def __deepcopy__(self, memo: dict[int, Any]) -> CodedWeights:
        """A copied drafter runs the same target."""
        return self

    def forwards(self) -> Iterator[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
        """What runs in the place of which layer."""
        yield from self.linears.items()

    @property
    def tensors(self) -> list[Tensor]:
        """What a forward reads in the place of weights."""
        return [part for linear in self.linears.values() for part in linear.codes[:3]]
