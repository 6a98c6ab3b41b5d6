"""Fused attention of torch, by kernels that need no plan per shape and store no scores.

Shapes: B batch, H query heads, K key-value heads, T queries, S keys, D head size.
On Hopper torch prefers cuDNN, which plans again for every shape; prompts, documents and unrolled
steps each have a new one. Without cuDNN a mask selects the memory-efficient kernel, which has no
grouped heads; they would fall back to a product that stores all scores [B, H, T, S]. So keys and
values are repeated for it. Documents packed into one row are one launch of flash attention with
their start offsets. A launch per document has too few programs and would leave most of a GPU idle.
Flash attention also has windows, where torch's front end has only masks.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

SDPA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Compute softmax(q k^T * scale) v, [B, H, T, D]; `mask` is [B, 1, T, S] or [T, S], bool or
    additive.
    """
    if q.device.type == "cpu":
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=True
        )
    return sdpa_without_cudnn(q, k, v, mask, is_causal, scale)


def sdpa_without_cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Compute the same without cuDNN, as on a GPU."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and (mask is not None or not _can_use_flash(q)):
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        groups = 1
    with sdpa_kernel(SDPA_BACKENDS):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=groups > 1
        )


def supports_documents(q: Tensor, v: Tensor) -> bool:
    """Tell whether `document_attention` can run on these queries and values, which needs a GPU."""
    return q.device.type == "cuda" and supports_flash(q) and q.shape[-1] == v.shape[-1]


def supports_flash(q: Tensor) -> bool:
    """Tell whether flash attention takes these queries directly, without the padding of torch's
    front end.
    """
    return _can_use_flash(q) and q.shape[-1] % 8 == 0


def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...] | None = None,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute causal attention within documents, [B, H, T, D]; a token attends to the last `window`
    positions.

    With `lengths` the documents are packed into one row and take one launch.
    """
    q, k, v = (x.to(_flash_dtype(q)).transpose(1, 2) for x in (q, k, v))
    back = None if window is None else window - 1  # earlier positions that a token attends to
    starts = None
    longest = q.shape[1]
    if lengths is not None:
        starts = document_starts(lengths, q.device)
        longest = max(lengths)
        q, k, v = (x.squeeze(0) for x in (q, k, v))
    output: Tensor = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        starts,
        starts,
        longest,
        longest,
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=back,
        window_size_right=0,
    )[0]
    return (output if lengths is None else output.unsqueeze(0)).transpose(1, 2)


def document_starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where each document begins and the last one ends, without a host-device
    synchronisation.
    """
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)


def _can_use_flash(q: Tensor) -> bool:
    """Tell whether flash attention takes these queries: half precision, autocast included, on a
    GPU that has it.
    """
    return (
        _flash_dtype(q) in (torch.bfloat16, torch.float16)
        and q.shape[-1] <= 256
        and _has_flash(q.device)
    )


def _has_flash(device: torch.device) -> bool:
    """Tell whether a GPU has flash attention: NVIDIA from Ampere on. A machine without a GPU plans
    for one that has it.

    AMD's returns the log-sum-exps of packed documents in another shape.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _flash_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype in which attention runs, autocast included."""
    kind = q.device.type
    cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if cast else q.dtype
