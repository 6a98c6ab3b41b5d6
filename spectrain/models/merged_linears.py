"""One product for the linears of a layer that read the same input, on a GPU: queries, keys and values; gate and up.

Their weights are put behind each other into one allocation, of which every parameter stays a part: nothing is held twice, and
whoever reads or writes a weight (an optimiser, a checkpoint, a merged adapter) also does so in the product. Whatever gives a
parameter other memory, as a copy, another device or another type does, undoes it: from then on each linear is multiplied by
itself again. Outputs are parts of one tensor [.., O].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .forward_override import set_forward
from .packed_linears import find_shared_linears, is_packed


class MergedWeights:
    """Linears whose weights lie behind each other. Whichever is asked first computes the outputs of all."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = list(linears)
        self.sizes = [linear.out_features for linear in linears]
        self.are_merged = True  # as far as is known; code that is being compiled cannot look
        self.storages: list[int] = []  # where they were put
        self.input: Tensor | None = None
        self.outputs: list[Tensor | None] = []  # of this input, those that were not asked for yet

    def take_output(self, place: int, input: Tensor) -> Tensor:
        """[.., D] -> [.., O] of one of the linears. Each output is handed out once: the same input again, which may have been
        written to, is computed again."""
        if self.input is not input or self.outputs[place] is None:
            if not torch.compiler.is_compiling():
                self.are_merged = self.are_adjacent()
            if not self.are_merged:
                self.input = None
                linear = self.linears[place]
                return F.linear(input, linear.weight, linear.bias)
            self.input, self.outputs = input, list(self.product(input).split(self.sizes, dim=-1))
        found, self.outputs[place] = self.outputs[place], None
        if all(output is None for output in self.outputs):
            self.input = None
        assert found is not None
        return found

    def product(self, input: Tensor) -> Tensor:
        """[.., D] -> [.., O], the outputs of all linears side by side."""
        biases = [linear.bias for linear in self.linears]
        return F.linear(
            input,
            _view_adjacent([linear.weight for linear in self.linears]),
            None if biases[0] is None else _view_adjacent(biases),
        )

    def are_adjacent(self) -> bool:
        """Whether nothing has been given other memory since."""
        weights, biases = ([getattr(linear, name) for linear in self.linears] for name in ("weight", "bias"))
        return _are_adjacent(weights) and (biases[0] is None or _are_adjacent(biases))


@dataclass
class MergedSlot:
    """Where an `nn.Linear` is among those of the same input."""

    weights: MergedWeights
    index: int


def _merged_forward(linear: Any, input: Tensor) -> Tensor:
    """A linear's output as a part of the product of all; its own product where a gradient is wanted."""
    kind = input.device.type
    learns = torch.is_grad_enabled() and (input.requires_grad or linear.weight.requires_grad)
    cast = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)  # else without data; 2.11 traces no more than this
    if learns or cast or input.dtype != linear.weight.dtype:
        return F.linear(input, linear.weight, linear.bias)
    joined = _get_slot(linear)
    return joined.weights.take_output(joined.index, input)


def _get_slot(linear: Any) -> MergedSlot:
    joined: MergedSlot = linear.joined
    return joined


@torch.no_grad()
def merge_linears(module: nn.Module) -> None:
    """Let the linears in `module` that read the same input be one product. Left alone are weights in few bits, that learn,
    that several modules share, or that lie in memory that is not theirs alone, as an optimiser's flat ones do."""
    uses = Counter(id(p) for part in module.modules() for p in part._parameters.values() if p is not None)
    for parent in module.modules():
        for linears in find_shared_linears(parent):
            if is_merged(linears[0]) and _get_slot(linears[0]).weights.are_adjacent():
                continue
            parameters = [(one, p) for one in linears for p in one._parameters.values() if p is not None]
            others = any("forward" in vars(one) and not (is_merged(one) or is_packed(one)) for one in linears)
            if not others and all(uses[id(p)] == 1 and _is_movable(one, p) for one, p in parameters):
                _merge_group(linears)


def is_merged(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "__func__", None) is _merged_forward


def _merge_group(linears: Sequence[nn.Linear]) -> None:
    weights = MergedWeights(linears)
    for name in ("weight", "bias"):
        parts: list[nn.Parameter] = [part for linear in linears if (part := getattr(linear, name)) is not None]
        if parts:
            for part, data in zip(parts, torch.cat([part.detach() for part in parts]).split([len(part) for part in parts])):
                part.data = data
            weights.storages.append(parts[0].untyped_storage()._cdata)
    for place, linear in enumerate(linears):
        vars(linear)["joined"] = MergedSlot(weights, place)  # no attribute of a module's: it has no parameters of its own
        set_forward(linear, MethodType(_merged_forward, linear))


def _is_movable(linear: nn.Linear, parameter: nn.Parameter) -> bool:
    """Whether a linear's parameter may lie elsewhere: nothing learns there, and it is alone or where it was put by joining."""
    storage = parameter.untyped_storage()
    own = parameter.numel() * parameter.element_size() == storage.nbytes()
    joined: MergedSlot | None = vars(linear).get("joined")
    put = joined is not None and storage._cdata in joined.weights.storages
    return (own or put) and parameter.is_contiguous() and not parameter.requires_grad


def _are_adjacent(parts: Sequence[Tensor]) -> bool:
    storage, end = parts[0].untyped_storage()._cdata, parts[0].storage_offset()
    for part in parts:
        if part.untyped_storage()._cdata != storage or part.storage_offset() != end or not part.is_contiguous():
            return False
        end += part.numel()
    return True


def _view_adjacent(parts: Sequence[Tensor]) -> Tensor:
    """What lies behind each other, as one tensor."""
    return parts[0].as_strided((sum(len(part) for part in parts), *parts[0].shape[1:]), parts[0].stride())
