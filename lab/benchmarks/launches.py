"""What a round of the engine costs in launches and memory, counted without a GPU and without
running anything.

The round runs on tensors that have shapes and no data ("meta"), by the kernels that a GPU runs,
before anything is compiled: fused, it launches fewer. Whatever asked the device for a value would
have none to get and fail, so a count is also a proof that the host waits for nothing inside a
round.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spectrain.decoding.captured import CapturedRunner
from spectrain.decoding.generation import ROUND_PARTS
from spectrain.decoding.loop import Request
from spectrain.decoding.static_rounds import RoundTimer

# Launches of our own operations; one launch where the table has none. Attention splits keys and
# combines; children of a level are found in parts and merged; a verdict chooses and walks;
# rejection walks, draws and, beside kernels, looks the draft vocabulary up and picks the best part;
# a commit advances the lengths, unless its last argument says that they have grown. Where top-k or
# top-p cut, candidates take two launches: for a verdict one more than choosing, for rejection two.
LAUNCHES = {
    "spectrain::tree_attention": 2,
    "spectrain::tree_match": 2,
    "spectrain::tree_recursive": 7,
    "spectrain::kv_commit": 2,
    "spectrain::append_children": 2,
}
# more where a cut, one of the last two, is given
CUTTING = {"spectrain::tree_match": 1, "spectrain::tree_recursive": 2}
SILENT = {
    "aten::empty",
    "aten::new_empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty_strided",
}


class LaunchCounter(TorchDispatchMode):
    """Counts operations that compute or move something, and the bytes of what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        out = func(*args, **(kwargs or {}))
        name = func.name().split(".")[0]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        # A single number of the host is passed by value; anything larger would be copied.
        devices = {tensor.device.type for tensor in (*inputs, *outputs) if tensor.dim()}
        assert devices <= {"meta"}, f"{name} has a tensor on the host"
        storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        new_tensors = [
            tensor for tensor in outputs if tensor.untyped_storage()._cdata not in storages
        ]
        writes = func._schema.is_mutable and torch.Tag.inplace_view not in func.tags
        if (new_tensors or writes) and name not in SILENT:
            cuts = name in CUTTING and any(cut is not None for cut in args[-2:])
            are_counted = name == "spectrain::kv_commit" and args[-1] is True
            count = LAUNCHES.get(name, 1) + cuts * CUTTING.get(name, 0) - are_counted
            self.launches[name] += count
        self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in new_tensors)
        return out


CounterOfParts = TypeVar("CounterOfParts", bound=LaunchCounter)


def count_round(
    engine: CapturedRunner, batch: int = 1, prompt: int = 16, new_tokens: int = 32
) -> dict[str, dict[str, int]]:
    """Launches and bytes made in every part of a round, of an engine whose target and drafter
    are on the device "meta".
    """
    return {
        part: {"launches": counter.launches.total(), "bytes": counter.bytes}
        for part, counter in count_parts(engine, batch, prompt, new_tokens, LaunchCounter).items()
    }


def count_parts(
    engine: CapturedRunner,
    batch: int = 1,
    prompt: int = 16,
    new_tokens: int = 32,
    counter: type[CounterOfParts] = LaunchCounter,  # type: ignore[assignment]
) -> dict[str, CounterOfParts]:
    """Count every part of a round by a kind of counter, of an engine whose target and drafter are
    on the device "meta".
    """
    assert engine.target.device.type == "meta", "move the target and the drafter to meta first"
    counts: dict[str, CounterOfParts] = {}
    with torch.no_grad():
        engine.start_batch(
            Request([[0] * prompt] * batch, new_tokens, list(range(batch)), frozenset())
        )
        for _ in range(2):  # the first reads the prompt
            engine.run_uncaptured_round(RoundTimer(engine.target.device))
        parts = engine.run_parts()
        for part in ROUND_PARTS[:-1]:
            with counter() as counts[part]:
                next(parts)
    return counts
