"""torch's fused attention, by kernels that take any shape as it comes and store no scores.

Shapes: B batch, H query heads, K key-value heads, T queries, S keys, D head size.
On Hopper torch prefers cuDNN, which plans anew for every shape: prompts, documents and unrolled steps have a new one each time.
Without it a mask leads to the memory-efficient kernel, which knows no grouped heads and would leave them to a product that
stores all scores [B, H, T, S]; so keys and values are repeated for it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """softmax(q k^T * scale) v over what `mask`, [B, 1, T, S] or [T, S], bool or added, lets be seen, [B, H, T, D]."""
    if q.device.type == "cpu":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=True)
    return unplanned(q, k, v, mask, is_causal, scale)


def unplanned(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """The same as a GPU runs it."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and (mask is not None or not _is_flash(q)):
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        groups = 1
    with sdpa_kernel(UNPLANNED):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=groups > 1)


def _is_flash(q: Tensor) -> bool:
    """Whether flash attention takes queries like these: in half precision, autocast's included."""
    kind = q.device.type
    cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return (torch.get_autocast_dtype(kind) if cast else q.dtype) in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256
