"""One product for the linears of a layer that read the same input, on a GPU: queries, keys and
values; gate and up.

Their weights move into one allocation, and every parameter becomes a view of it. So nothing is
stored twice, and a write to a weight (by an optimiser, a checkpoint, a merged adapter) also changes
the product. Giving a parameter other memory, by a copy, a device or a type, undoes the merge: each
linear is then multiplied by itself again. Outputs are parts of one tensor [.., O].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.models.forward_override import set_forward

from .packed_linears import is_packed
from .shared_product import SharedProduct, find_shared_linears


class MergedWeights(SharedProduct):
    """Linears with adjacent weights, which are multiplied as one."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__(linears)
        self.are_merged = True  # as last checked; compiled code cannot check
        self.storages: list[int] = []  # storages of the merged weights

    def take_output(self, index: int, input: Tensor) -> Tensor:
        """Return the output of one linear: its part of the merged product, or its own product
        where the merge was undone.
        """
        if self.input is not input or self.outputs[index] is None:
            if not torch.compiler.is_compiling():
                self.are_merged = self.are_adjacent()
            if not self.are_merged:
                self.input = None
                linear = self.linears[index]
                return F.linear(input, linear.weight, linear.bias)
        return super().take_output(index, input)

    def product(self, input: Tensor) -> Tensor:
        biases = [linear.bias for linear in self.linears]
        return F.linear(
            input,
            _view_adjacent([linear.weight for linear in self.linears]),
            None if biases[0] is None else _view_adjacent(biases),
        )

    def are_adjacent(self) -> bool:
        """Return whether the parameters still share their memory."""
        weights, biases = (
            [getattr(linear, name) for linear in self.linears] for name in ("weight", "bias")
        )
        return _are_adjacent(weights) and (biases[0] is None or _are_adjacent(biases))


def _merged_forward(linear: Any, input: Tensor) -> Tensor:
    """Return the output of a linear as a part of the merged product, or of its own product where
    a gradient is needed.
    """
    kind = input.device.type
    learns = torch.is_grad_enabled() and (input.requires_grad or linear.weight.requires_grad)
    # Other device types hold no data. Torch 2.11 traces no more than this.
    cast = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
    if learns or cast or input.dtype != linear.weight.dtype:
        return F.linear(input, linear.weight, linear.bias)
    output: Tensor = linear.merged_weights.take_output(linear.merged_index, input)
    return output


@torch.no_grad()
def merge_linears(module: nn.Module, trainable: bool = False) -> None:
    """Merge the linears in `module` that read the same input into one product. Quantized, trainable
    and shared weights stay as they are, and so do weights inside larger storage, such as the flat
    buffers of an optimiser. With `trainable`, weights that could be trained are merged too, because
    nothing trains them now; where they need gradients, each is multiplied by itself."""
    uses = Counter(
        id(p) for part in module.modules() for p in part._parameters.values() if p is not None
    )
    for parent in module.modules():
        for linears in find_shared_linears(parent):
            if is_merged(linears[0]) and vars(linears[0])["merged_weights"].are_adjacent():
                continue
            parameters = [
                (linear, p)
                for linear in linears
                for p in linear._parameters.values()
                if p is not None
            ]
            overridden = any(
                "forward" in vars(linear) and not (is_merged(linear) or is_packed(linear))
                for linear in linears
            )
            if not overridden and all(
                uses[id(p)] == 1 and _is_movable(linear, p, trainable) for linear, p in parameters
            ):
                _merge_group(linears)


def is_merged(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "__func__", None) is _merged_forward


def _merge_group(linears: Sequence[nn.Linear]) -> None:
    weights = MergedWeights(linears)
    for name in ("weight", "bias"):
        parts: list[nn.Parameter] = [
            part for linear in linears if (part := getattr(linear, name)) is not None
        ]
        if parts:
            for part, data in zip(
                parts,
                torch.cat([part.detach() for part in parts]).split([len(part) for part in parts]),
            ):
                part.data = data
            weights.storages.append(parts[0].untyped_storage()._cdata)
    for index, linear in enumerate(linears):
        vars(linear).update(merged_weights=weights, merged_index=index)
        set_forward(linear, MethodType(_merged_forward, linear))


def _is_movable(linear: nn.Linear, parameter: nn.Parameter, trainable: bool) -> bool:
    """Return whether a parameter may move: it is frozen, and alone in its storage or put there
    by a merge.
    """
    storage = parameter.untyped_storage()
    is_alone = parameter.numel() * parameter.element_size() == storage.nbytes()
    weights: MergedWeights | None = vars(linear).get("merged_weights")
    is_merged_storage = weights is not None and storage._cdata in weights.storages
    return (
        (is_alone or is_merged_storage)
        and parameter.is_contiguous()
        and (trainable or not parameter.requires_grad)
    )


def _are_adjacent(parts: Sequence[Tensor]) -> bool:
    storage = parts[0].untyped_storage()._cdata
    end = parts[0].storage_offset()
    for part in parts:
        if (
            part.untyped_storage()._cdata != storage
            or part.storage_offset() != end
            or not part.is_contiguous()
        ):
            return False
        end += part.numel()
    return True


def _view_adjacent(parts: Sequence[Tensor]) -> Tensor:
    """Return adjacent tensors as one view."""
    return parts[0].as_strided(
        (sum(len(part) for part in parts), *parts[0].shape[1:]), parts[0].stride()
    )
