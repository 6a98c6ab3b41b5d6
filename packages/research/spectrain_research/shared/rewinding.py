"""Drafting behind committed tokens of the target's own cache that are run once more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from spectrain.models.kv_cache import TreeCache


@contextmanager
def rewind_tokens(cache: TreeCache, committed: int) -> Iterator[None]:
    """Hide the newest committed tokens of every row of a cache while the context is open, discard
    what was appended meanwhile, and restore the tokens bit by bit.
    """
    cache.check_no_states()
    assert not cache.is_bounded and cache.storage is not None and not cache.uncommitted
    device = cache.lengths.device
    rows = torch.arange(len(cache.lengths), device=device)[:, None]
    slots = cache.lengths[:, None] - committed + torch.arange(committed, device=device)
    before = cache.storage[:, :, rows, slots]
    cache.roll_back(committed)
    try:
        yield
    finally:
        cache.roll_back()
        cache.storage[:, :, rows, slots] = before
        cache.lengths += committed
        cache.longest += committed
