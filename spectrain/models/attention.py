"""Attention over whole texts, in training: causal, and never from one packed document to another.

Shapes: B batch, T tokens, S keys, H query heads, K key-value heads, D head size.
Documents of a packed row are attended to one by one: no [T, T] mask is built, and nothing is computed that a mask would hide.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.kernels.tree_attention import attend_softcapped

Attend = Callable[..., Tensor]


def by_document(attend: Attend, lengths: tuple[int, ...] | None, *parts: Tensor) -> Tensor:
    """attend(*parts) over [B, heads, T, D] each, or document by document where these have `lengths`."""
    if lengths is None or len(lengths) == 1:
        return attend(*parts)
    return torch.cat([attend(*part) for part in zip(*(part.split(lengths, dim=2) for part in parts))], dim=2)


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...] | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """[B, H, T, D], each token seeing those up to its own, of its document, in the last `window` positions."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length, mask = q.shape[2], None
        if softcap is not None or (window is not None and length > window):
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
            mask = mask if window is None else mask.triu(1 - window)
        if softcap is not None:
            return attend_softcapped(q, k, v, mask, q.shape[-1] ** -0.5 if scale is None else scale, softcap)
        causal = mask is None and length > 1
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True)

    return by_document(attend, lengths, q, k, v)


def unrolled_attention(q: Tensor, keys: list[Tensor], values: list[Tensor], lengths: tuple[int, ...] | None = None) -> Tensor:
    """[B, H, T, D] of a drafter that rolls over its own states: the first keys are causal, and of each later step, token t
    sees the key of its own index."""
    if len(keys) == 1:
        return causal_attention(q, keys[0], values[0], lengths)

    def attend(q: Tensor, *parts: Tensor) -> Tensor:
        length, steps = q.shape[2], len(keys)
        eye = torch.eye(length, dtype=torch.bool, device=q.device)
        mask = torch.cat([torch.ones_like(eye).tril(), eye.repeat(1, steps - 1)], dim=1)
        k, v = torch.cat(parts[:steps], dim=2), torch.cat(parts[steps:], dim=2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return by_document(attend, lengths, q, *keys, *values)
