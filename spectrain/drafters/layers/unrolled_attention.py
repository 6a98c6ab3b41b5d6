"""The attention of a drafter that is unrolled over its own states in training, as EAGLE's: over two
sets of keys, computed separately and merged by their log-sum-exps. It is exact and needs no mask.

It gives each token, after the causal keys of the first step, one key of every later step. With l =
log sum exp of the causal scores and s_i the scores of the later keys, of all L = log(e^l + sum_i
e^s_i):

    out = e^(l - L) out_causal + sum_i e^(s_i - L) v_i

Backward, the causal kernel computes the gradients of its part exactly from the joint `out` and L,
because these two are all that it needs of its forward (Dao, arXiv 2307.08691, section 3.1.2: dS = P
(dP - rowsum(dO O)), P = exp(S - L)).

Shapes: B batch, H query heads, K key-value heads, G = H / K, T tokens, S later steps, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spectrain.kernels.fused_attention import (
    document_starts,
    supports_documents,
    supports_flash,
)
from spectrain.kernels.later_keys import add_later_keys, later_gradients
from spectrain.models.attention import (
    attend_per_document,
    attend_rows,
    causal_attention,
    find_text_kernels,
    needs_scores,
)
from spectrain.models.cache_types import DEFAULT_OPTIONS, AttentionOptions

aten = torch.ops.aten


def unrolled_attention(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    lengths: tuple[int, ...] | None = None,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> Tensor:
    """Return [B, H, T, D] for a drafter that is unrolled over its own states. The keys of the first
    step are causal; of each later step, token t sees the key of its own index. Each step is one
    position later, and a window counts positions."""
    if len(keys) == 1:
        return causal_attention(q, keys[0], values[0], lengths, options)
    steps = len(keys)
    window = options.window

    def join(parts: Sequence[Tensor], lengths: tuple[int, ...] | None) -> Tensor:
        later_keys, later_values = (
            torch.stack([*parts[begin + 1 : begin + steps]], dim=2) for begin in (1, 1 + steps)
        )
        return merged_attention(
            parts[0], parts[1], parts[1 + steps], later_keys, later_values, options.scale, lengths
        )

    def is_joined(q: Tensor, longest: int) -> bool:
        is_unlimited = window is None or longest + steps - 1 <= window
        return is_mergeable(q, values[0]) and not needs_scores(options) and is_unlimited

    def attend(q: Tensor, *parts: Tensor) -> Tensor:
        if is_joined(q, q.shape[2]):
            return join((q, *parts), None)
        return attend_rows(q, parts[:steps], parts[steps:], 0, options)

    if (
        lengths is not None
        and len(lengths) > 1
        and supports_documents(q, values[0])
        and is_joined(q, max(lengths))
    ):
        return join((q, *keys, *values), lengths)
    return attend_per_document(attend, lengths, q, *keys, *values)


def is_mergeable(q: Tensor, v: Tensor) -> bool:
    """Return whether a causal kernel that returns log-sum-exps takes these: on a CPU, and flash
    attention on a GPU.
    """
    if q.shape[-1] != v.shape[-1]:
        return False
    half = q.dtype in (torch.bfloat16, torch.float16)
    is_gpu = q.device.type in ("cuda", "meta")
    return q.device.type == "cpu" or (is_gpu and half and supports_flash(q))


def merged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    later_keys: Tensor,
    later_values: Tensor,
    scale: float | None = None,
    lengths: tuple[int, ...] | None = None,
) -> Tensor:
    """Return [B, H, T, D]: queries [B, H, T, D] see k and v [B, K, T, D] causally, and of the keys
    and values of later steps [B, K, S, T, D] those at their own index. On a GPU, `lengths` are
    documents packed into one row, which do not see each other."""
    joined: Tensor = _MergedAttention.apply(
        q, k, v, later_keys, later_values, q.shape[-1] ** -0.5 if scale is None else scale, lengths
    )
    return joined


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        later_keys: Tensor,
        later_values: Tensor,
        scale: float,
        lengths: tuple[int, ...] | None,
    ) -> Tensor:
        ctx.scale = scale
        ctx.kernels = find_text_kernels(q, k, v, q.shape[2]) if lengths is None else None
        if ctx.kernels is not None:
            first, lse = ctx.kernels.attend_with_lse(q, k, v, scale)
        else:
            first, lse, ctx.causal_state = _causal_forward(q, k, v, scale, lengths)
        out, total, share = add_later_keys(q, first, lse, later_keys, later_values, scale)
        ctx.save_for_backward(q, k, v, later_keys, later_values, out, total, share)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, later_keys, later_values, out, total, share = ctx.saved_tensors
        if ctx.kernels is not None:
            grad_q, grad_k, grad_v = ctx.kernels.gradients(grad, q, k, v, out, total, ctx.scale)
        else:
            grad_q, grad_k, grad_v = _causal_backward(
                grad, q, k, v, out, total, ctx.causal_state, ctx.scale
            )
        grad_q, *later = later_gradients(
            grad, q, out, (total, share), later_keys, later_values, grad_q, ctx.scale
        )
        gradients = grad_q, grad_k, grad_v, *later
        return (*(gradient.to(k.dtype) for gradient in gradients), None, None)


def _repeat_heads(heads: Tensor, groups: int) -> Tensor:
    """Repeat key-value heads [B, K, T, D] so that every query head has its own."""
    return heads if groups == 1 else heads.repeat_interleave(groups, dim=1)


def _causal_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, lengths: tuple[int, ...] | None
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Return causal attention, its log-sum-exps [B, H, T], and the state that its backward
    needs. Only the kernel of a CPU needs a key-value head for every query head.
    """
    if lengths is not None:
        starts = document_starts(lengths, q.device)
        longest = max(lengths)
        q, k, v = (_flatten_heads(x) for x in (q, k, v))
        documents = starts, starts, longest, longest
        out, lse, seed, offset, _ = aten._flash_attention_forward(
            q, k, v, *documents, 0.0, True, False, scale=scale
        )
        return out[None].transpose(1, 2), lse[None], (*documents, seed, offset, True)
    if q.device.type == "cpu":
        k, v = (_repeat_heads(x, q.shape[1] // x.shape[1]) for x in (k, v))
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, True, attn_mask=None, scale=scale
        )
        return out, lse if lse.shape[1] == q.shape[1] else lse.transpose(1, 2), ()
    out, lse, *state, _ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, True, False, scale=scale
    )
    return out, lse, (*state, False)


def _flatten_heads(heads: Tensor) -> Tensor:
    """Return [1, H, T, D] as [T, H, D]."""
    return heads[0].transpose(0, 1)


def _causal_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    state: tuple[Any, ...],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values [B, H, T, D], given the joint output and
    log-sum-exps.
    """
    if state and state[-1]:
        grad, q, k, v, out = (_flatten_heads(x) for x in (grad, q, k, v, out))
        *documents, seed, offset, _ = state
        flat = aten._flash_attention_backward(
            grad, q, k, v, out, lse[0], *documents, 0.0, True, seed, offset, scale=scale
        )
        grad_q, grad_k, grad_v = (part[None].transpose(1, 2) for part in flat)
        return grad_q, grad_k, grad_v
    if q.device.type == "cpu":
        groups = q.shape[1] // k.shape[1]
        k, v = _repeat_heads(k, groups), _repeat_heads(v, groups)
        grad_q, grad_k, grad_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.contiguous(), q, k, v, out, lse, 0.0, True, attn_mask=None, scale=scale
        )
        grad_k, grad_v = (part.unflatten(1, (-1, groups)).sum(2) for part in (grad_k, grad_v))
        return grad_q, grad_k, grad_v
    starts_q, starts_k, most_q, most_k, seed, offset, _ = state
    gradients: tuple[Tensor, Tensor, Tensor]
    gradients = aten._scaled_dot_product_flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        starts_q,
        starts_k,
        most_q,
        most_k,
        0.0,
        True,
        seed,
        offset,
        scale=scale,
    )
    return gradients
