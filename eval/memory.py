"""What a drafter adds to the memory that decoding takes."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.models.target import Target
from spectrain.trees import TreeBuilder

TOKENS = 24  # decoded while memory is watched


def extra_memory(
    target: Target, drafter: Drafter, builder: TreeBuilder, rule: AcceptanceRule, prompt: list[int]
) -> dict[str, int]:
    """Bytes beside those of decoding without the drafter: its own `weights`, and what more a decoding holds at its peak.

    `working` is the difference of two peaks, with and without the drafter, of one prompt and a few tokens: caches, trees,
    logits of more nodes.
    """
    length = min(TOKENS, target.max_length - len(prompt))
    free = rule.matching_rule()
    with_drafter = peak(lambda: decode(target, [prompt], rule, length, drafter, builder), target.device)
    without = peak(lambda: decode(target, [prompt], free, length), target.device)
    weights = own_bytes(target, drafter)
    return {"weights": weights, "working": max(0, with_drafter - without), "extra": weights + max(0, with_drafter - without)}


def own_bytes(target: Target, drafter: Drafter) -> int:
    """Bytes of the drafter's parameters and buffers that are not the target's."""
    theirs = {tensor.data_ptr() for tensor in (*target.parameters(), *target.buffers())}
    own = {tensor.data_ptr(): tensor for tensor in (*drafter.parameters(), *drafter.buffers())}
    return sum(tensor.numel() * tensor.element_size() for place, tensor in own.items() if place not in theirs)


def peak(work: Callable[[], object], device: torch.device) -> int:
    """The most bytes that `work` held at a time beyond what was held before."""
    work()  # what is compiled, packed or calibrated at first use stays
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    with HeldBytes() as held:
        work()
    return held.peak


class HeldBytes(TorchDispatchMode):
    """The most bytes that tensors made while it is entered hold at a time. What an operation needs inside is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.bytes = 0  # bytes: at least what is held, exactly where it reaches the peak
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}  # by address, which is kept for them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [storage for storage in storages(result) if storage._cdata not in self.storages]
        before = {storage._cdata for storage in storages((args, kwargs))} if made else set()
        for storage in made:
            if storage._cdata not in before and storage._cdata not in self.storages:
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.bytes += storage.nbytes()
        if self.bytes > self.peak:  # only then it matters what is gone
            self.storages = {place: held for place, held in self.storages.items() if not held[0].expired()}
            self.bytes = sum(size for _, size in self.storages.values())
            self.peak = max(self.peak, self.bytes)
        return result


def storages(values: Any) -> Iterator[UntypedStorage]:
    """What the tensors in these values are stored in; packed weights hide theirs."""
    if isinstance(values, Tensor):
        if not values.is_mkldnn:
            yield values.untyped_storage()
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from storages(value)
    elif isinstance(values, dict):
        yield from storages(list(values.values()))
