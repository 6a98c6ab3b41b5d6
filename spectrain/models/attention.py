"""The attention of the target's layers: over a cached tree, or causal over texts, never across
packed documents.

Shapes: B batch, T tokens, S keys, H query heads, K key-value heads, D head size. The documents of a
packed row are attended to one by one, or on a GPU in one launch that reads their boundaries. No [T,
T] mask is built, and nothing that a mask would hide is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from spectrain.errors import UserError
from spectrain.kernels.dispatch import run_on_cpu
from spectrain.kernels.fused_attention import (
    document_attention,
    fused_attention,
    supports_documents,
)
from spectrain.kernels.tree_attention import Visibility, eager_attention, tree_attention

from .cache_types import DEFAULT_OPTIONS, AttentionOptions, KeyValueShape
from .compiled_layers import attend_layer, mark_layer_done
from .kv_cache import TreeCache
from .masks import ATTENTION_NAME as ATTENTION_NAME

MASKED_ROWS = 1024  # positions whose mask exists at one time
AttentionFunction = Callable[..., Tensor]


def attend_per_document(
    attend: AttentionFunction, lengths: tuple[int, ...] | None, *parts: Tensor
) -> Tensor:
    """Apply `attend` to tensors [B, heads, T, D], or separately to each document where `lengths`
    are given.
    """
    if lengths is None or len(lengths) == 1:
        return attend(*parts)
    return torch.cat(
        [attend(*part) for part in zip(*(part.split(lengths, dim=2) for part in parts))], dim=2
    )


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...] | None = None,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> Tensor:
    """Return [B, H, T, D]: each token attends to itself and earlier tokens of its document, within
    the last `options.window` positions. Features and training take compiled kernels where there are
    any."""
    longest = max(lengths or (q.shape[2],))
    is_unlimited = options.window is None or options.window >= longest
    kernels = None
    if is_unlimited and not needs_scores(options):
        kernels = find_text_kernels(q, k, v, longest)
    if kernels is not None:
        return attend_per_document(
            lambda q, k, v: kernels.attend(q, k, v, options.scale), lengths, q, k, v
        )
    return torch_causal_attention(q, k, v, lengths, options)


def find_text_kernels(q: Tensor, k: Tensor, v: Tensor, longest: int) -> Any:
    """Return an installed package's causal attention of queries [B, H, T, D], keys and values [B,
    K, T, D] of texts of up to so many tokens: `attend`, with gradients, and its parts
    `attend_with_lse` and `gradients`. None where torch attends."""
    if torch.compiler.is_compiling():
        return None
    return run_on_cpu("causal_attention", q, k, v, longest)


def torch_causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...] | None = None,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> Tensor:
    """Return causal attention by torch's own kernels. Prompts that are decoded take them,
    because `generate` does.
    """
    longest = max(lengths or (q.shape[2],))
    if options.window is not None and options.window >= longest:
        options = options._replace(window=None)
    window = options.window
    by_scores = needs_scores(options)
    packed = lengths is not None and len(lengths) > 1
    if not by_scores and (packed or window is not None) and supports_documents(q, v):
        return document_attention(q, k, v, lengths, options.scale, window)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if by_scores or (window is not None and q.shape[2] > window):
            return attend_rows(q, [k], [v], 0, options)
        return _attend_masked(q, k, v, None, options)

    return attend_per_document(attend, lengths, q, k, v)


def needs_scores(options: AttentionOptions) -> bool:
    """Tell whether the scores themselves are needed, which fused attention does not have."""
    return options.softcap is not None or options.sinks is not None


def _attend_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Return [B, H, T, D], by a mask [T, S], or causal without one."""
    if needs_scores(options):
        scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
        return eager_attention(q, k, v, mask, scale, options.softcap, options.sinks)
    return fused_attention(q, k, v, mask, mask is None and q.shape[2] > 1, options.scale)


def attend_rows(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    first_row: int,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> Tensor:
    """Return [B, H, R, D] of the R consecutive positions of a text from `first_row` on, which
    attend causally to the keys and values of a first step [B, K, T, D]. Where a drafter is
    unrolled over its own states, position r also sees keys and values r of each later step
    [B, K, R, D], which is one position later.

    A mask [r, S] exists for r rows at a time and for the keys that any of them sees; the backward
    pass builds it again.
    """
    outputs = list[Tensor]()
    steps = len(keys)
    window = options.window
    for start in range(0, q.shape[2], MASKED_ROWS):
        rows = slice(start, min(start + MASKED_ROWS, q.shape[2]))
        oldest = 0 if window is None else max(0, first_row + start + steps - window)
        seen = slice(oldest, first_row + rows.stop)
        seen_keys, seen_values = (
            [part[:, :, seen if step == 0 else rows] for step, part in enumerate(parts)]
            for parts in (keys, values)
        )
        chunk = partial(_attend_row_chunk, first_row=first_row + start - oldest, options=options)
        if torch.is_grad_enabled() and q.shape[2] > MASKED_ROWS:
            outputs.append(
                checkpoint(chunk, q[:, :, rows], seen_keys, seen_values, use_reentrant=False)
            )
        else:
            outputs.append(chunk(q[:, :, rows], seen_keys, seen_values))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _attend_row_chunk(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    first_row: int,
    options: AttentionOptions,
) -> Tensor:
    """Compute `attend_rows` for rows [B, H, r, D] that begin at the key `first_row`, by a mask."""
    count = q.shape[2]
    steps = len(keys)
    window = options.window
    rows = torch.arange(first_row, first_row + count, device=q.device)[:, None]
    order = torch.arange(keys[0].shape[2], device=q.device)
    first = order <= rows if window is None else (order <= rows) & (order >= rows + steps - window)
    eye = torch.eye(count, dtype=torch.bool, device=q.device)
    later = [
        eye if window is None or steps - step < window else torch.zeros_like(eye)
        for step in range(2, steps + 1)
    ]
    return _attend_masked(
        q,
        torch.cat([*keys], dim=2),
        torch.cat([*values], dim=2),
        torch.cat([first, *later], dim=1),
        options,
    )


@dataclass(frozen=True)
class AttentionRange:
    """How far back a layer attends: over its last `window` positions, or within its chunk of
    `chunk` positions.
    """

    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one attention call, recorded while a target is inspected."""

    layer: int
    shape: KeyValueShape
    mask: Tensor | None
    window: int | None
    unsupported: tuple[str, ...]  # arguments that change the outcome, and are not supported here


UNSUPPORTED_ARGUMENTS = ("position_bias", "indices", "block_indices", "sinks")


def layer_attention(  # transformers calls it, by these names
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    visibility: Visibility | list[Visibility] | None = None,
    tree_cache: TreeCache | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    calls: list[AttentionCall] | None = None,
    lengths: tuple[int, ...] | None = None,
    layer_visibility: Sequence[Visibility | list[Visibility]] | None = None,
    ranges: Mapping[int, AttentionRange] | None = None,
    attends: Callable[[Tensor, Tensor, Tensor, AttentionOptions], Tensor] | None = None,
    rotation: tuple[Tensor, Tensor] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of every target layer: tree attention with a `visibility`, else causal
    attention over texts, which may be packed documents of these `lengths`. Over a cached tree, a
    layer may leave the `rotation` of its queries and keys, by cosines and sines, to attention.

    `ranges` gives the range of layers that do not pass their own. `layer_visibility` gives a
    visibility per layer where layers differ. A drafter with a layer of the same kind passes
    `attends` and computes the attention itself.
    """
    if calls is not None:
        unsupported = tuple(name for name in UNSUPPORTED_ARGUMENTS if others.get(name) is not None)
        shape = KeyValueShape(key.shape[1], key.shape[3], value.shape[3])
        calls.append(
            AttentionCall(module.layer_idx, shape, attention_mask, sliding_window, unsupported)
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # The compiled code is the same for all layers.
    if (
        tree_cache is not None
        and visibility is not None
        and attends is None
        and torch.compiler.is_compiling()
    ):
        angles = (None, None) if rotation is None else rotation
        return attend_layer(query, key, value, scale, sliding_window, softcap, s_aux, *angles), None
    # The index of a module that several layers share is below 0.
    layer = module.layer_idx
    chunk = None
    layer = layer if layer >= 0 or tree_cache is None else tree_cache.last_updated
    if ranges is not None and layer in ranges:
        sliding_window = ranges[layer].window
        chunk = ranges[layer].chunk
    visibility = visibility if layer_visibility is None else layer_visibility[layer]
    arguments = scale, sliding_window, softcap, s_aux
    options = AttentionOptions(*arguments)
    if attends is not None:
        return attends(query, key, value, options).transpose(1, 2).contiguous(), None
    if visibility is None:
        _check_keys(key.shape[2] == query.shape[2], layer)
        if tree_cache is not None:
            tree_cache.write(layer, key, value)
        lengths = lengths if chunk is None else chunk_lengths(lengths or (query.shape[2],), chunk)
        attend = causal_attention if tree_cache is None else torch_causal_attention
        return attend(query, key, value, lengths, options).transpose(1, 2).contiguous(), None
    if isinstance(visibility, list):
        trees = iter(
            visibility if chunk is None else [tree.in_chunks(chunk) for tree in visibility]
        )
        attended = attend_per_document(
            lambda q, k, v: tree_attention(q, k, v, next(trees), *arguments),
            lengths,
            query,
            key,
            value,
        )
        return attended.transpose(1, 2).contiguous(), None
    visibility = visibility if chunk is None else visibility.in_chunks(chunk)
    if tree_cache is None:
        return tree_attention(query, key, value, visibility, *arguments).transpose(
            1, 2
        ).contiguous(), None
    mark_layer_done(layer)
    if tree_cache.query_observer is not None:
        tree_cache.query_observer(layer, query, scale)
    attended = tree_cache.attend(layer, query, key, value, visibility, options, rotation)
    return attended.transpose(1, 2).contiguous(), None


def _check_keys(are_tokens: bool, layer: int) -> None:
    """Raise UserError where a layer that reads a text attends to more or fewer keys than it has
    tokens.
    """
    if not are_tokens:
        raise UserError(
            f"target: layer {layer} attends to keys that are no tokens, such as compressed ones, "
            "which trees cannot take back; use another target"
        )


def chunk_lengths(lengths: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the lengths of the chunks that documents of these lengths split into, each from its
    own start.
    """
    return tuple(
        min(size, length - start) for length in lengths for start in range(0, length, size)
    )


def attn_implementation_for(config: Any, implementation: str) -> str | dict[str, str]:
    """Return the transformers setting by which the decoder attends with `implementation`; a
    vision encoder keeps its own.
    """
    text = config.get_text_config()
    parts = [
        name for name in getattr(config, "sub_configs", {}) if getattr(config, name, None) is text
    ]
    return {"": implementation, **dict.fromkeys(parts, implementation)} if parts else implementation


AttentionInterface.register(ATTENTION_NAME, layer_attention)
