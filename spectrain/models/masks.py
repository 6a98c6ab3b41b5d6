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
class Mask:
    """One that a model asked for."""

    function: MaskFunction
    size: int | None  # of its windows or chunks

    def at(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[Q, K] which keys are seen from where."""
        none = torch.zeros((), dtype=torch.int64, device=queries.device)
        seen = self.function(none, none, queries[:, None], keys[None])
        return torch.as_tensor(seen).expand(len(queries), len(keys))


_asked: list[list[tuple[Tensor, Mask]]] = []


@contextmanager
def masks_asked_for() -> Iterator[list[tuple[Tensor, Mask]]]:
    """Every mask that a model asks for meanwhile, with the tensor that it gets in answer."""
    asked: list[tuple[Tensor, Mask]] = []
    _asked.append(asked)
    try:
        yield asked
    finally:
        _asked.pop()


def mask_of(
    *args: Any,
    q_length: int = 0,
    kv_length: int = 0,
    mask_function: MaskFunction | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """What transformers calls for a mask: none, for attention knows itself what a token sees; while a target is checked, a
    causal one [1, 1, Q, K], by which the layers that are given it are known."""
    if not _asked or mask_function is None:
        return None
    mask = torch.ones(q_length, kv_length, dtype=torch.bool, device=kwargs.get("device")).tril()[None, None]
    _asked[-1].append((mask, Mask(mask_function, local_size)))
    return mask
