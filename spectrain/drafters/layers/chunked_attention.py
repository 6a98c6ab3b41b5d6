"""Attention in training of places that draft behind a text, some of them at a time.

Shapes: N tokens of a context, C drafting places, n tokens and c places of a chunk, H query heads, G key-value heads, D head
size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spectrain.kernels.fused_attention import fused_attention

Chunk = tuple[slice, slice]
"""Drafting places that belong together, whole blocks of one document, and the tokens that any of them sees."""


def attend_chunks(
    qkv: tuple[Tensor, Tensor, Tensor],
    context: tuple[Tensor, Tensor],
    chunks: Iterable[Chunk],
    positions: tuple[Tensor, Tensor],
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """[1, H, C, D] of drafting queries [1, H, C, D], keys and values [1, G, C, D] behind a context's keys and values
    [1, G, N, D].

    `places` are the last token [C] that each sees, and how many positions further on it stands [C], from 1; of one document,
    those with the same last token are a block. A place sees the tokens up to that one, and of its block the places up to
    itself, or without `causal` all of them; with a window only so many positions back, its own counted. A chunk's mask and
    scores are made again for the backward pass, so that no more than one is ever held.
    """
    (q, k, v), (last, depth), found = qkv, positions, []
    for rows, tokens in chunks:
        near, far = (q[:, :, rows], k[:, :, rows], v[:, :, rows]), (context[0][:, :, tokens], context[1][:, :, tokens])
        chunk = near, far, (last[rows] - tokens.start, depth[rows]), causal, window
        found.append(
            checkpoint(_attend_chunk, *chunk, use_reentrant=False) if torch.is_grad_enabled() else _attend_chunk(*chunk)
        )
    if not found:  # nothing to see, but other processes wait for a gradient of every weight
        return q + 0 * sum(part.sum() for part in (k, v, *context))
    return torch.cat(found, dim=2)


def _attend_chunk(
    drafting: tuple[Tensor, Tensor, Tensor],
    context: tuple[Tensor, Tensor],
    places: tuple[Tensor, Tensor],
    causal: bool,
    window: int | None,
) -> Tensor:
    """[1, H, c, D] of one chunk, the same of whose tokens alone."""
    (q, k, v), (far_k, far_v), (last, depth) = drafting, context, places
    order = torch.arange(far_k.shape[2], device=q.device)
    before, inside = order <= last[:, None], last == last[:, None]
    if causal:
        inside = inside & (depth <= depth[:, None])
    if window is not None:
        before = before & (order > (last + depth - window)[:, None])
        inside = inside & (depth > depth[:, None] - window)
    keys, values = torch.cat([far_k, k], dim=2), torch.cat([far_v, v], dim=2)
    mask = torch.cat([before, inside], dim=1)
    return fused_attention(q, keys, values, mask)
