"""Decoder layers compiled for decoding: one compilation of a shape serves all layers of a model,
whose code stays unchanged.

Inductor fuses the norms, rotary embedding and activation of a layer with its matrix products.
Attention is one opaque
operation: it looks up its cache, tree and layer when it runs, so none of them is traced, and the
index of a layer, which is all that differs between layers, never enters the compiled code. Nor does
the storage of a cache: Inductor copied a tensor that is written to at every call (Torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.kernels.tree_attention import Visibility

from .cache_types import DEFAULT_OPTIONS, AttentionOptions
from .forward_override import override_forwards
from .kv_cache import TreeCache, live_caches

MAX_SHAPES = 64  # compiled shapes (batch sizes times numbers of nodes) per process


@dataclass
class ForwardContext:
    """The forward that runs: the visibility of its attention, and the layers that are still to
    come.
    """

    cache: TreeCache
    visibility: Visibility
    layers: Iterator[int]


_contexts: list[ForwardContext] = []


@contextmanager
def set_forward_context(
    cache: TreeCache | None, visibility: Visibility | list[Visibility] | None, layers: Iterable[int]
) -> Iterator[None]:
    """Set the cache, tree and layer order of compiled layers while the context is open."""
    if cache is None or visibility is None:
        yield
        return
    assert isinstance(visibility, Visibility), "packed documents have no cache"
    _contexts.append(ForwardContext(cache, visibility, iter(layers)))
    try:
        yield
    finally:
        _contexts.pop()


def mark_layer_done(layer: int) -> None:
    """Record that a layer attended uncompiled, so that the next compiled layer is not mistaken
    for it.
    """
    if _contexts:
        following = next(_contexts[-1].layers)
        assert following == layer, f"layer {layer} runs where layer {following} was to run"


@torch.library.custom_op("spectrain::attend_layer", mutates_args=())
def attend_layer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
) -> Tensor:
    """Append keys and values of the next layer and attend, [B, N, H, D]. Queries and keys are first
    rotated by cosines and sines [1 or B, N, D], if any.
    """
    now = _contexts[-1]
    options = AttentionOptions(scale, window, softcap, sinks)
    rotation = None if cos is None or sin is None else (cos, sin)
    attended = now.cache.attend(next(now.layers), q, k, v, now.visibility, options, rotation)
    return attended.transpose(1, 2).contiguous()


@attend_layer.register_fake
def _fake_attention(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
    batch, heads, nodes, _ = q.shape
    return q.new_empty(batch, nodes, heads, v.shape[-1])


def attend_with_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    cache: TreeCache,
    layer: int,
    options: AttentionOptions = DEFAULT_OPTIONS,
    positions: Tensor | None = None,
) -> Tensor:
    """Append keys and values of a layer to a drafter's cache and attend, [B, N, H, D], from
    compiled code.
    """
    return _attend_with_cache(
        q,
        k,
        v,
        visible,
        cache.lengths,
        cache.cache_id,
        layer,
        cache.uncommitted,
        *options,
        positions,
    )


@torch.library.custom_op("spectrain::attend_with_cache", mutates_args=())
def _attend_with_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    lengths: Tensor,
    cache_id: Tensor,
    layer: int,
    uncommitted: int,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    positions: Tensor | None,
) -> Tensor:
    """Attend with the lengths and uncommitted nodes at this point of the code; the cache itself
    is updated at the end.
    """
    cache = live_caches[int(cache_id)]
    before = cache.lengths, cache.uncommitted
    cache.lengths, cache.uncommitted = lengths, uncommitted
    try:
        attended = cache.attend_new(
            layer, q, k, v, visible, AttentionOptions(scale, window, softcap, sinks), positions
        )
    finally:
        cache.lengths, cache.uncommitted = before
    return attended.transpose(1, 2).contiguous()


_attend_with_cache.register_fake(_fake_attention)


@cache
def _compile_layer(backend: str) -> Any:
    def run(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return type(layer).forward(layer, *args, **kwargs)

    return torch.compile(run, backend=backend, dynamic=False)


def compile_function(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Compile a function for calls of fixed shapes. It gets its own code object, so that its
    compilations count separately.
    """
    assert isinstance(function, FunctionType)
    copied = FunctionType(function.__code__.replace(), function.__globals__)
    return torch.compile(copied, backend=backend, dynamic=False)


@contextmanager
def compile_layers(layers: Iterable[nn.Module], backend: str) -> Iterator[None]:
    """Run these layers of targets compiled, over a tree or a single node with a cache, while the
    context is open.
    """
    forwards = [(layer, partial(_compile_layer(backend), layer)) for layer in layers]
    assert not any("forward" in vars(layer) for layer, _ in forwards), (
        "something else runs in a layer's place"
    )
    with torch._dynamo.config.patch(recompile_limit=MAX_SHAPES), override_forwards(forwards):
        yield
