"""One product for the linears of a layer that read the same input: queries, keys and values; gate
and up.

Shapes: D input width, O output widths of all linears, side by side.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from spectrain.models.architectures.quantized import has_dense_weight

SHARED_INPUT_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class SharedProduct(ABC):
    """Linears that read the same input. The first one that is called computes the outputs of
    all.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = list(linears)
        self.sizes = [linear.out_features for linear in linears]
        self.input: Tensor | None = None
        self.outputs: list[Tensor | None] = []  # outputs of this input, not yet taken

    @abstractmethod
    def product(self, input: Tensor) -> Tensor:
        """Return the outputs of all linears side by side, [.., D] -> [.., O]."""

    def take_output(self, index: int, input: Tensor) -> Tensor:
        """Return the output of one linear. Each output is returned once: the same input again may
        have been written to, so it is multiplied again."""
        if self.input is not input or self.outputs[index] is None:
            self.input, self.outputs = input, list(self.product(input).split(self.sizes, dim=-1))
        output, self.outputs[index] = self.outputs[index], None
        if all(other is None for other in self.outputs):
            self.input = None
        assert output is not None
        return output


def find_shared_linears(parent: nn.Module) -> list[list[nn.Linear]]:
    """Return the linears of a block that read the same input, by their names, where their
    weights are dense and alike.
    """
    groups = []
    for names in SHARED_INPUT_NAMES:
        children = [
            child for name in names if type(child := getattr(parent, name, None)) is nn.Linear
        ]
        linears = [linear for linear in children if has_dense_weight(linear)]
        alike = (
            len(
                {
                    (linear.in_features, linear.bias is None, linear.weight.dtype)
                    for linear in linears
                }
            )
            == 1
        )
        if len(linears) == len(names) and alike:
            groups.append(linears)
    return groups
