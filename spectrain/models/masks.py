"""What a model's masks say, asked for once, when a target is checked: otherwise no mask is ever built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MaskFunction = Callable[..., Tensor]
"""transformers' way to say what is seen: of batch, head, query and key indices, whether the key is."""


@dataclass(frozen=True)
class RequestedMask:
    """One that a model asked for."""

    function: MaskFunction
    size: int | None  # of its windows or chunks

    def visible_keys(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[Q, K] which keys are seen from where."""
        none = torch.zeros((), dtype=torch.int64, device=queries.device)
        seen = self.function(none, none, queries[:, None], keys[None])
        return torch.as_tensor(seen).expand(len(queries), len(keys))


_recorded: list[list[tuple[Tensor, RequestedMask]]] = []


@contextmanager
def record_masks() -> Iterator[list[tuple[Tensor, RequestedMask]]]:
    """Every mask that a model asks for meanwhile, with the tensor that it gets in answer."""
    asked: list[tuple[Tensor, RequestedMask]] = []
    _recorded.append(asked)
    try:
        yield asked
    finally:
        _recorded.pop()


def make_mask(
    *args: Any,
    q_length: int = 0,
    kv_length: int = 0,
    mask_function: MaskFunction | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """What transformers calls for a mask: none, for attention knows itself what a token sees; while a target is checked, a
    causal one [1, 1, Q, K], by which the layers that are given it are known."""
    if not _recorded or mask_function is None:
        return None
    mask = torch.ones(q_length, kv_length, dtype=torch.bool, device=kwargs.get("device")).tril()[None, None]
    _recorded[-1].append((mask, RequestedMask(mask_function, local_size)))
    return mask
