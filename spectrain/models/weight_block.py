"""Parts of a drafter that training may shard on their own, so that their weights are gathered only
while they are used. Shapes: R rows, D width.
"""

from collections.abc import Callable
from typing import ClassVar, TypeVar

from torch import Tensor, nn

from spectrain.kernels.linear_divergence import Projection

T = TypeVar("T")


class WeightBlock(nn.Module):
    """A module whose weights are read in training only inside its `forward` and `weight_methods`.

    FSDP2 gathers the weights of a block before these methods and frees them after them. Every
    tensor with a gradient that they read must be an argument, and every tensor that they compute a
    result: the gathered weights are freed again once the gradients of the arguments are there.
    """

    # Methods beside `forward` that read the weights.
    weight_methods: ClassVar[tuple[str, ...]] = ()


class BlockLinear(WeightBlock, nn.Linear):
    """A linear layer that is a block of its own, because it is large."""


class OutputLayer(BlockLinear):
    """An output layer over the draft vocabulary: `forward` computes logits, and `apply_loss` a loss
    that multiplies with the weights itself.
    """

    weight_methods = ("apply_loss",)

    def apply_loss(self, states: Tensor, loss: Callable[[Projection, Tensor], T]) -> T:
        """Return `loss(projection, states)` for states [R, D], with the layer's weights as they
        are now.
        """
        return loss(Projection(self.weight, self.bias), states)


def apply_output_layer(
    layer: nn.Linear, states: Tensor, loss: Callable[[Projection, Tensor], T]
) -> T:
    """Return `loss(projection, states)` for states [R, D]: with the weights of an `OutputLayer`
    gathered, or with those of a plain linear layer, which FSDP2 gathers for the whole batch.
    """
    if isinstance(layer, OutputLayer):
        return layer.apply_loss(states, loss)
    return loss(Projection(layer.weight, layer.bias), states)
