"""The interface to the compiled causal attention of a CPU (`cpu_causal`), with its gradients.

Shapes: B batch, H query heads, K key-value heads, G = H / K, T tokens, S = T up to a multiple of
32, d head size.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu_kernels import PANEL_COLUMNS, has_panel_kernels

MAX_LENGTH = 768
"""Tokens up to which texts are attended to so: probabilities [T, S] of all heads exist at one
time.
"""
MAX_THREADS = 2
"""Threads up to which the kernels, which run on one, are faster than torch on all."""


@cache
def _load_causal() -> Any:
    """Import the compiled kernels, where `has_panel_kernels` is true."""
    from . import cpu_causal

    return cpu_causal


def has_text_kernels(q: Tensor, k: Tensor, v: Tensor, longest: int) -> bool:
    """Return whether the kernels take queries [B, H, T, d], keys and values [B, K, T, d] of
    texts of up to so many tokens.
    """
    if q.device.type != "cpu" or not q.dtype == k.dtype == v.dtype == torch.bfloat16:
        return False
    fits = (
        longest <= MAX_LENGTH
        and q.shape[2] == k.shape[2]
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] % PANEL_COLUMNS == 0
    )
    return (
        fits
        and q.numel() > 0
        and torch.get_num_threads() <= MAX_THREADS
        and has_panel_kernels(torch.bfloat16)
    )


def attend_text(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return causal attention [B, H, T, d], and its log-sum-exps [B, H, T]."""
    batch, num_heads, length, size = q.shape
    q = q.contiguous()
    k = _pad_tokens(k)
    v = _pad_tokens(v)
    probabilities = q.new_empty(batch, num_heads, length, k.shape[2])
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    panels = _make_panels(k)
    scratch = _make_scratch(length)
    _load_causal().causal_probabilities(
        q.data_ptr(),
        panels.data_ptr(),
        probabilities.data_ptr(),
        lse.data_ptr(),
        batch * num_heads,
        num_heads // k.shape[1],
        length,
        size,
        scale,
        scratch.data_ptr(),
    )
    return torch.bmm(_by_group(probabilities, k), v.flatten(0, 1)).view(q.shape), lse


def text_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values from that of the output [B, H, T, d].

    The output and the log-sum-exps may be those of attention to further keys.
    """
    batch, num_heads, length, size = q.shape
    grad = grad.to(q.dtype).contiguous()
    q = q.contiguous()
    k = _pad_tokens(k)
    v = _pad_tokens(v)
    dots = (grad.float() * out).sum(-1)
    lse = lse.contiguous()
    probabilities, score_gradients = q.new_empty(2, batch, num_heads, length, k.shape[2])
    key_panels = _make_panels(k)
    value_panels = _make_panels(v)
    scratch = _make_scratch(length)
    _load_causal().causal_score_gradients(
        q.data_ptr(),
        key_panels.data_ptr(),
        grad.data_ptr(),
        value_panels.data_ptr(),
        dots.data_ptr(),
        lse.data_ptr(),
        probabilities.data_ptr(),
        score_gradients.data_ptr(),
        batch * num_heads,
        num_heads // k.shape[1],
        length,
        size,
        scale,
        scratch.data_ptr(),
    )
    probabilities, score_gradients, rows, grads = (
        _by_group(part, k) for part in (probabilities, score_gradients, q, grad)
    )
    grad_q = torch.bmm(score_gradients, k.flatten(0, 1)).view(q.shape)
    grad_k = torch.bmm(score_gradients.transpose(1, 2), rows).view(k.shape)
    grad_v = torch.bmm(probabilities.transpose(1, 2), grads).view(v.shape)
    return grad_q, grad_k[:, :, :length], grad_v[:, :, :length]


def _pad_tokens(heads: Tensor) -> Tensor:
    """Return keys or values [B, K, S, d], with zeros after the last token."""
    return F.pad(heads, (0, 0, 0, -heads.shape[2] % PANEL_COLUMNS))


def _by_group(heads: Tensor, k: Tensor) -> Tensor:
    """Return values of query heads [B, H, T, ..], with the heads that share a key head side by
    side: [B K, G T, ..].
    """
    return heads.reshape(k.shape[0] * k.shape[1], -1, heads.shape[-1])


def _make_panels(heads: Tensor) -> Tensor:
    """Return keys or values [B, K, S, d] in panels [B K, S / 32, d / 2, 2, 16, 2]."""
    blocks = heads.reshape(
        heads.shape[0] * heads.shape[1], -1, 2, PANEL_COLUMNS // 2, heads.shape[-1] // 2, 2
    )
    return blocks.permute(0, 1, 4, 2, 3, 5).contiguous()


def _make_scratch(length: int) -> Tensor:
    """Return the working memory of the scores of two tiles of rows, [2, S / 32, rows, 32]."""
    return torch.empty(2 * (length // PANEL_COLUMNS + 1) * _load_causal().TILE)
