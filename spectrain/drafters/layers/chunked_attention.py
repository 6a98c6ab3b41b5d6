"""Training attention from draft slots to a text and to their blocks, computed in chunks.

Shapes: N tokens of a context, C draft slots, n tokens and c slots of a chunk, H query heads, G
key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spectrain.kernels.fused_attention import fused_attention

Chunk = tuple[slice, slice]
"""A range of draft slots, complete blocks of one document, and the range of tokens that any of
them sees.
"""


def attend_chunks(
    qkv: tuple[Tensor, Tensor, Tensor],
    context: tuple[Tensor, Tensor],
    chunks: Iterable[Chunk],
    positions: tuple[Tensor, Tensor],
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """Attend from draft slots, queries [1, H, C, D], keys and values [1, G, C, D], to a context [1,
    G, N, D] and their blocks.

    `positions` are the last token [C] that each slot sees, and its offset [C] after that token,
    from 1. Slots of one document with the same last token form a block. A slot sees the tokens up
    to the last one, and the slots of its block up to itself, or all of them without `causal`. A
    window counts positions back, the slot's own included. The backward pass recomputes a chunk's
    mask and scores, so that only one exists at a time. Returns [1, H, C, D].
    """
    (q, k, v), (last, depth), outputs = qkv, positions, []
    for rows, tokens in chunks:
        draft_qkv = (q[:, :, rows], k[:, :, rows], v[:, :, rows])
        context_kv = (context[0][:, :, tokens], context[1][:, :, tokens])
        chunk = draft_qkv, context_kv, (last[rows] - tokens.start, depth[rows]), causal, window
        outputs.append(
            checkpoint(_attend_chunk, *chunk, use_reentrant=False)
            if torch.is_grad_enabled()
            else _attend_chunk(*chunk)
        )
    # Without slots, every weight still needs a gradient, because other processes wait for it.
    if not outputs:
        return q + 0 * sum(part.sum() for part in (k, v, *context))
    return torch.cat(outputs, dim=2)


def _attend_chunk(
    qkv: tuple[Tensor, Tensor, Tensor],
    context: tuple[Tensor, Tensor],
    positions: tuple[Tensor, Tensor],
    causal: bool,
    window: int | None,
) -> Tensor:
    """Compute `attend_chunks` for one chunk: [1, H, c, D]."""
    (q, k, v), (context_k, context_v), (last, depth) = qkv, context, positions
    order = torch.arange(context_k.shape[2], device=q.device)
    sees_context = order <= last[:, None]
    sees_block = last == last[:, None]
    if causal:
        sees_block = sees_block & (depth <= depth[:, None])
    if window is not None:
        sees_context = sees_context & (order > (last + depth - window)[:, None])
        sees_block = sees_block & (depth > depth[:, None] - window)
    keys = torch.cat([context_k, k], dim=2)
    values = torch.cat([context_v, v], dim=2)
    mask = torch.cat([sees_context, sees_block], dim=1)
    return fused_attention(q, keys, values, mask)
