"""Attention of new nodes whose queries, keys and values are not rotated yet, over a drafter's
cache: three launches.

Shapes: B batch, N new nodes, H query heads, K key-value heads, D head size, T positions, W words of
64 appended nodes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spectrain.kernels.rotate_append import rotate_append
from spectrain.kernels.tree_attention import attend_by_words

from .kv_cache import TreeCache, live_caches


def rotate_and_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    positions: Tensor,
    words: Tensor,
    cache: TreeCache,
    layer: int,
) -> Tensor:
    """Rotate the products q [B, N, H D] and k [B, N, K D] by their positions [B, N], append keys
    and values v [B, N, K D] to a layer of the cache, and attend: [B, N, H D].

    Node n sees the committed tokens and the appended nodes of its `words` [B, N, W]. `table` [T, 2,
    D / 2] has the cosines and sines. May be compiled.
    """
    if torch.compiler.is_compiling():
        state = cache.lengths, cache.cache_id, cache.uncommitted
        attended: Tensor = _attend_compiled(q, k, v, table, positions, words, *state, layer)
        return attended
    return _attend(q, k, v, table, positions, words, cache, layer)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    positions: Tensor,
    words: Tensor,
    cache: TreeCache,
    layer: int,
) -> Tensor:
    _, num_new, width = k.shape
    size = 2 * table.shape[-1]
    storage = cache.lend_storage(num_new, width // size, size, k.dtype)
    queries = rotate_append(
        storage[layer], q, k, v, table, positions, cache.lengths, cache.uncommitted
    )
    num_appended = cache.uncommitted + num_new
    keys, values = (slots.transpose(1, 2) for slots in cache.keys_values(layer))
    longest = cache.max_prefix_length(num_new)
    attended = attend_by_words(
        queries, keys, values, words, cache.lengths, num_appended, longest, size**-0.5
    )
    return attended.transpose(1, 2).flatten(2)


@torch.library.custom_op("spectrain::rotate_and_attend", mutates_args=())
def _attend_compiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    positions: Tensor,
    words: Tensor,
    lengths: Tensor,
    cache_id: Tensor,
    uncommitted: int,
    layer: int,
) -> Tensor:
    """Attend with the lengths and uncommitted nodes at this point of the code; the cache itself is
    updated at its end.
    """
    cache = live_caches[int(cache_id)]
    before = cache.lengths, cache.uncommitted
    cache.lengths, cache.uncommitted = lengths, uncommitted
    try:
        return _attend(q, k, v, table, positions, words, cache, layer)
    finally:
        cache.lengths, cache.uncommitted = before


@_attend_compiled.register_fake
def _(q: Tensor, *args: Any) -> Tensor:
    return q.new_empty(q.shape)
