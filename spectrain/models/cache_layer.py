"""A layer of the key-value cache as `transformers` calls it, and the types of keys in it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .accelerator import accelerator


def attention_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type in which keys are attended to by torch. On a CPU half precision becomes
    float64: the rounded sums over keys are then the same in whatever order the keys lie, while in
    half precision one different bit changes the logits."""
    return (
        torch.float64
        if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16)
        else dtype
    )


def storage_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type in which keys are stored: their own where kernels widen them, else that of
    attention.
    """
    return dtype if accelerator().reads_keys(dtype, device) else attention_dtype(dtype, device)


class CacheOwner(Protocol):
    """The cache that a layer belongs to (`kv_cache.TreeCache`)."""

    longest: int
    uncommitted: int
    max_length: int
    last_updated: int

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int = 0
    ) -> tuple[Tensor, Tensor]: ...


class CacheLayer(CacheLayerMixin):
    """One layer of the cache, with the interface of `transformers`."""

    is_sliding = False

    def __init__(self, owner: CacheOwner) -> None:
        super().__init__()
        self.owner = owner
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.owner.update(key_states, value_states, self.owner.last_updated)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.owner.longest + self.owner.uncommitted

    def get_max_length(self) -> int:
        return self.owner.max_length
