"""Recording the masks that a model requests while a target is inspected; otherwise no mask is
ever built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface

ATTENTION_NAME = "spectrain"
"""The name of this project's attention in transformers."""
MaskFunction = Callable[..., Tensor]
"""(batch, head, query and key indices) -> whether the query sees the key, as transformers
defines it.
"""


@dataclass(frozen=True)
class RequestedMask:
    """A mask that a model requested."""

    function: MaskFunction
    size: int | None  # of its windows or chunks

    def visible_keys(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return [Q, K], which keys each query sees."""
        none = torch.zeros((), dtype=torch.int64, device=queries.device)
        visible = self.function(none, none, queries[:, None], keys[None])
        return torch.as_tensor(visible).expand(len(queries), len(keys))


_recorded: list[list[tuple[Tensor, RequestedMask]]] = []


@contextmanager
def record_masks() -> Iterator[list[tuple[Tensor, RequestedMask]]]:
    """Record every mask that a model requests while the context is open, with the tensor that it
    receives.
    """
    requests: list[tuple[Tensor, RequestedMask]] = []
    # transformers asks for masks only where a function makes them. Before it asks, it reads the
    # positions on the host, for which a training would wait in every forward.
    AttentionMaskInterface.register(ATTENTION_NAME, make_mask)
    _recorded.append(requests)
    try:
        yield requests
    finally:
        _recorded.pop()
        if not _recorded:
            del AttentionMaskInterface._global_mapping[ATTENTION_NAME]


def make_mask(
    *args: Any,
    q_length: int = 0,
    kv_length: int = 0,
    mask_function: MaskFunction | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Answer the mask request of transformers: with None, because attention has the visibility of
    tokens; while a target is inspected, with a causal mask [1, 1, Q, K] that identifies the layers
    which receive it."""
    if not _recorded or mask_function is None:
        return None
    mask = torch.ones(q_length, kv_length, dtype=torch.bool, device=kwargs.get("device")).tril()[
        None, None
    ]
    _recorded[-1].append((mask, RequestedMask(mask_function, local_size)))
    return mask
