"""torch's fused attention, by kernels that take any shape as it comes and store no scores.

Shapes: B batch, H query heads, K key-value heads, T queries, S keys, D head size.
On Hopper torch prefers cuDNN, which plans anew for every shape: prompts, documents and unrolled steps have a new one each time.
Without it a mask leads to the memory-efficient kernel, which knows no grouped heads and would leave them to a product that
stores all scores [B, H, T, S]; so keys and values are repeated for it.
Documents packed into one row are one launch of flash attention, told where each begins, in place of one a document, whose few
programs would leave most of a GPU idle; and windows are its own, where torch's front has only masks.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

SDPA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """softmax(q k^T * scale) v over what `mask`, [B, 1, T, S] or [T, S], bool or added, lets be seen, [B, H, T, D]."""
    if q.device.type == "cpu":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=True)
    return sdpa_without_cudnn(q, k, v, mask, is_causal, scale)


def sdpa_without_cudnn(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """The same as a GPU runs it."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and (mask is not None or not _can_use_flash(q)):
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        groups = 1
    with sdpa_kernel(SDPA_BACKENDS):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=groups > 1)


def supports_documents(q: Tensor, v: Tensor) -> bool:
    """Whether flash attention takes queries and values like these as `document_attention` gives them to it, on a GPU."""
    return q.device.type == "cuda" and supports_flash(q) and q.shape[-1] == v.shape[-1]


def supports_flash(q: Tensor) -> bool:
    """Whether flash attention takes queries like these where it is called by itself, without the padding of torch's front."""
    return _can_use_flash(q) and q.shape[-1] % 8 == 0


def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...] | None = None,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """[B, H, T, D]: each token sees those up to its own, of its document, in the last `window` positions. With `lengths` the
    documents are packed into one row, and are one launch."""
    q, k, v = (x.to(_flash_dtype(q)).transpose(1, 2) for x in (q, k, v))
    back = None if window is None else window - 1  # positions before its own that a token sees
    starts, longest = None, q.shape[1]
    if lengths is not None:
        starts, longest = document_starts(lengths, q.device), max(lengths)
        q, k, v = (x.squeeze(0) for x in (q, k, v))
    found: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, longest, longest, 0.0, True, False, scale=scale, window_size_left=back, window_size_right=0
    )[0]
    return (found if lengths is None else found.unsqueeze(0)).transpose(1, 2)


def document_starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Where each document begins, and the last one ends; the host waits for nothing."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)


def _can_use_flash(q: Tensor) -> bool:
    """Whether flash attention takes queries like these: in half precision, autocast's included, on a GPU that has it."""
    return _flash_dtype(q) in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256 and _has_flash(q.device)


def _has_flash(device: torch.device) -> bool:
    """NVIDIA's from Ampere on; AMD's gives the log-sum-exps of packed documents in another shape. Where there is none, one that
    has it is planned for."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _flash_dtype(q: Tensor) -> torch.dtype:
    """What queries are attended in."""
    kind = q.device.type
    cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if cast else q.dtype
