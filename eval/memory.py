"""The memory that a drafter adds to decoding."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter, drafting_cost
from spectrain.models.target import Target
from spectrain.trees import TreeBuilder

TOKENS = 24  # tokens that are decoded while memory is measured


def extra_memory(
    target: Target, drafter: Drafter, builder: TreeBuilder, rule: AcceptanceRule, prompt: list[int]
) -> dict[str, int]:
    """Measure the bytes that the drafter adds to decoding: its own `weights`, the `working` memory,
    and their sum `extra`.

    `working` is the difference of two peaks, with and without the drafter, of one prompt and a few
    tokens: caches, trees, logits of more nodes.
    """
    length = min(TOKENS, target.max_length - len(prompt))
    matching = rule.matching_rule()
    with_drafter = peak_bytes(
        lambda: decode(target, [prompt], rule, length, drafter, builder), target.device
    )
    without = peak_bytes(lambda: decode(target, [prompt], matching, length), target.device)
    # Quantized copies of the target's weights are no parameters of the drafter: only its cost names
    # them.
    weights = own_bytes(target, nn.ModuleList([drafter, drafting_cost(drafter).weights(target)]))
    working = max(0, with_drafter - without)
    return {"weights": weights, "working": working, "extra": weights + working}


def own_bytes(target: Target, drafter: nn.Module) -> int:
    """Count the bytes of a drafter's parameters and buffers that are not the target's."""
    target_addresses = {tensor.data_ptr() for tensor in iterate_plain_tensors(target)}
    own = {tensor.data_ptr(): tensor for tensor in iterate_plain_tensors(drafter)}
    return sum(
        tensor.numel() * tensor.element_size()
        for address, tensor in own.items()
        if address not in target_addresses
    )


def iterate_plain_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that hold a module's parameters and buffers: quantized weights wrap
    several, which have addresses.
    """
    pending: list[Any] = [*module.parameters(), *module.buffers()]
    while pending:
        tensor = pending.pop()
        if is_traceable_wrapper_subclass(tensor):
            pending += [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        else:
            yield tensor


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that `work` held at a time, beyond those held before it."""
    # The first run keeps what is compiled, packed or calibrated at first use.
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    with MemoryCounter() as counter:
        work()
    return counter.peak


class MemoryCounter(TorchDispatchMode):
    """Counts the most bytes held at a time by tensors that are made while it is entered, without
    an operation's inner ones.
    """

    def __init__(self) -> None:
        super().__init__()
        # `bytes` is an upper bound of what is held, and exact at the peak.
        self.peak = self.bytes = 0
        # By address, which no other storage takes while the reference exists.
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [
            storage for storage in iterate_storages(result) if storage._cdata not in self.storages
        ]
        before = {storage._cdata for storage in iterate_storages((args, kwargs))} if made else set()
        for storage in made:
            if storage._cdata not in before and storage._cdata not in self.storages:
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.bytes += storage.nbytes()
        # Freed storages matter only at a new peak.
        if self.bytes > self.peak:
            self.storages = {
                address: entry for address, entry in self.storages.items() if not entry[0].expired()
            }
            self.bytes = sum(size for _, size in self.storages.values())
            self.peak = max(self.peak, self.bytes)
        return result


def iterate_storages(values: Any) -> Iterator[UntypedStorage]:
    """Yield the storages of the tensors in these values; packed weights hide theirs."""
    if isinstance(values, Tensor):
        if not values.is_mkldnn:
            yield values.untyped_storage()
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from iterate_storages(value)
    elif isinstance(values, dict):
        yield from iterate_storages(list(values.values()))
