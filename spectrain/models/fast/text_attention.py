"""Causal attention of texts by compiled kernels on a CPU, with gradients. Shapes: B batch, H query
heads, K key-value heads, T tokens, d head size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spectrain.kernels.cpu_texts import attend_text, has_text_kernels, text_gradients


def is_compiled_text(q: Tensor, k: Tensor, v: Tensor, longest: int) -> bool:
    """Return whether compiled kernels take queries [B, H, T, d], keys and values [B, K, T, d] of
    texts of up to so many tokens."""
    return not torch.compiler.is_compiling() and has_text_kernels(q, k, v, longest)


def text_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Return causal attention [B, H, T, d] by compiled kernels."""
    attended: Tensor = _TextAttention.apply(
        q, k, v, q.shape[-1] ** -0.5 if scale is None else scale
    )
    return attended


class _TextAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out, lse = attend_text(q, k, v, scale)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return (*text_gradients(grad, q, k, v, out, lse, ctx.scale), None)
