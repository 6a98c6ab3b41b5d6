"""Add one key of every later draft step to causal attention that has been computed, and the
gradients of it: one launch each way.

Shapes: B batch, H query heads, K key-value heads, G = H / K, T tokens, S later steps, D head size.
The references in torch come first. A program owns the G queries of a token that share keys. The
softmax is merged online: it starts with the causal output, whose log-sum-exp is known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatch import jit, takes_gradients, tl, triton


def add_later_keys_reference(
    q: Tensor, first: Tensor, lse: Tensor, keys: Tensor, values: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return attention [B, H, T, D] of queries [B, H, T, D] over causal keys and the later ones
    [B, K, S, T, D], from that over causal keys alone; its log-sum-exps [B, H, T]; and the shares
    [B, K, G, S, T] of the later keys.
    """
    batch, num_heads, length, size = q.shape
    groups = num_heads // keys.shape[1]
    shape = batch, -1, groups, length
    grouped = q.unflatten(1, (-1, groups))[:, :, :, None].float()
    scores = (grouped * keys[:, :, None]).sum(-1) * scale  # [B, K, G, S, T]
    causal_lse = lse.view(shape)[:, :, :, None]
    total = torch.cat([causal_lse, scores], dim=3).logsumexp(dim=3, keepdim=True)
    share = (scores - total).exp()
    out = first.view(*shape, size) * (causal_lse - total).exp()[:, :, :, 0, :, None]
    out = (out + (share[..., None] * values[:, :, None]).sum(3)).to(q.dtype).view(q.shape)
    return out, total.view(batch, num_heads, length), share


def later_gradients_reference(
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    share: Tensor,
    keys: Tensor,
    values: Tensor,
    grad_q: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, later keys and later values, given the gradient of the
    output and that of the queries through causal keys.
    """
    groups = q.shape[1] // keys.shape[1]
    grad, out, q = (
        part.float().unflatten(1, (-1, groups))[:, :, :, None] for part in (grad, out, q)
    )
    grad_scores = share * ((grad * values[:, :, None]).sum(-1) - (grad * out).sum(-1)) * scale
    grad_q = grad_q + (grad_scores[..., None] * keys[:, :, None]).sum(3).flatten(1, 2)
    grad_keys = (grad_scores[..., None] * q).sum(2)
    return grad_q, grad_keys, (share[..., None] * grad).sum(2)


@jit
def _add_later_keys_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    first_ptr,
    lse_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    total_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    first_stride_b,
    first_stride_h,
    first_stride_t,
    num_steps,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge the later keys of one token and key-value head; grid [T, B K]. The output is laid out
    as [B, T, H, D].
    """
    token = tl.program_id(0).to(tl.int64)
    length = tl.num_programs(0)
    pair = tl.program_id(1).to(tl.int64)
    batch = pair // KV_HEADS
    member = tl.arange(0, BLOCK_G)
    head = (pair % KV_HEADS) * GROUP + member
    dim = tl.arange(0, BLOCK_D)
    inside = (member[:, None] < GROUP) & (dim[None, :] < SIZE)
    q_ptr += batch * q_stride_b + token * q_stride_t
    first_ptr += batch * first_stride_b + token * first_stride_t
    q = tl.load(q_ptr + head[:, None] * q_stride_h + dim[None, :], mask=inside, other=0.0)
    q = q.to(tl.float32) * scale
    out = tl.load(first_ptr + head[:, None] * first_stride_h + dim[None, :], mask=inside, other=0.0)
    out = out.to(tl.float32)
    row = (batch * KV_HEADS * GROUP + head) * length + token
    largest = tl.load(lse_ptr + row, mask=member < GROUP, other=0.0)
    mass = tl.full([BLOCK_G], 1.0, tl.float32)
    offset = pair * num_steps * length * SIZE + token * SIZE + dim
    for _ in range(num_steps):
        key = tl.load(keys_ptr + offset, mask=dim < SIZE, other=0.0).to(tl.float32)
        value = tl.load(values_ptr + offset, mask=dim < SIZE, other=0.0).to(tl.float32)
        score = tl.sum(q * key[None, :], 1)
        above = tl.maximum(largest, score)
        decay = tl.exp(largest - above)
        added = tl.exp(score - above)
        out = out * decay[:, None] + added[:, None] * value[None, :]
        mass = mass * decay + added
        largest = above
        offset += length * SIZE
    out = (out / mass[:, None]).to(out_ptr.dtype.element_ty)
    out_ptr += ((batch * length + token) * KV_HEADS * GROUP + head[:, None]) * SIZE + dim[None, :]
    tl.store(out_ptr, out, mask=inside)
    tl.store(total_ptr + row, largest + tl.log(mass), mask=member < GROUP)


@jit
def _later_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    q_ptr,
    out_ptr,
    total_ptr,
    keys_ptr,
    values_ptr,
    grad_q_ptr,
    grad_keys_ptr,
    grad_values_ptr,
    grad_stride_b,
    grad_stride_h,
    grad_stride_t,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    out_stride_b,
    out_stride_h,
    out_stride_t,
    grad_q_stride_b,
    grad_q_stride_h,
    grad_q_stride_t,
    num_steps,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add the gradients through the later keys of one token and key-value head; grid [T, B K]."""
    token = tl.program_id(0).to(tl.int64)
    length = tl.num_programs(0)
    pair = tl.program_id(1).to(tl.int64)
    batch = pair // KV_HEADS
    member = tl.arange(0, BLOCK_G)
    head = (pair % KV_HEADS) * GROUP + member
    heads = head[:, None]
    dim = tl.arange(0, BLOCK_D)
    dims = dim[None, :]
    inside = (member[:, None] < GROUP) & (dims < SIZE)
    grad_ptr += batch * grad_stride_b + token * grad_stride_t + heads * grad_stride_h + dims
    q_ptr += batch * q_stride_b + token * q_stride_t + heads * q_stride_h + dims
    out_ptr += batch * out_stride_b + token * out_stride_t + heads * out_stride_h + dims
    grad_q_ptr += batch * grad_q_stride_b + token * grad_q_stride_t
    grad_q_ptr += heads * grad_q_stride_h + dims
    grad = tl.load(grad_ptr, mask=inside, other=0.0).to(tl.float32)
    q = tl.load(q_ptr, mask=inside, other=0.0).to(tl.float32) * scale
    out = tl.load(out_ptr, mask=inside, other=0.0).to(tl.float32)
    grad_q = tl.load(grad_q_ptr, mask=inside, other=0.0).to(tl.float32)
    row = (batch * KV_HEADS * GROUP + head) * length + token
    # A member beyond the group has no share of any key.
    total = tl.load(total_ptr + row, mask=member < GROUP, other=float("inf"))
    delta = tl.sum(grad * out, 1)
    offset = pair * num_steps * length * SIZE + token * SIZE + dim
    for _ in range(num_steps):
        key = tl.load(keys_ptr + offset, mask=dim < SIZE, other=0.0).to(tl.float32)
        value = tl.load(values_ptr + offset, mask=dim < SIZE, other=0.0).to(tl.float32)
        share = tl.exp(tl.sum(q * key[None, :], 1) - total)
        score_grad = share * (tl.sum(grad * value[None, :], 1) - delta)
        grad_q += (score_grad * scale)[:, None] * key[None, :]
        grad_key = tl.sum(score_grad[:, None] * q, 0).to(grad_keys_ptr.dtype.element_ty)
        grad_value = tl.sum(share[:, None] * grad, 0).to(grad_values_ptr.dtype.element_ty)
        tl.store(grad_keys_ptr + offset, grad_key, mask=dim < SIZE)
        tl.store(grad_values_ptr + offset, grad_value, mask=dim < SIZE)
        offset += length * SIZE
    tl.store(grad_q_ptr, grad_q.to(grad_q_ptr.dtype.element_ty), mask=inside)


def _launch_settings(q: Tensor, keys: Tensor) -> dict[str, int]:
    """Return the constants of a launch: 16 numbers of a tensor for each thread."""
    size = q.shape[-1]
    group = q.shape[1] // keys.shape[1]
    block_g, block_d = triton.next_power_of_2(group), triton.next_power_of_2(size)
    return {
        "KV_HEADS": keys.shape[1],
        "GROUP": group,
        "SIZE": size,
        "BLOCK_G": block_g,
        "BLOCK_D": block_d,
        "num_warps": min(8, max(1, block_g * block_d // 512)),
    }


@torch.library.custom_op("spectrain::add_later_keys", mutates_args=())
def _launch_add_later_keys(
    q: Tensor, first: Tensor, lse: Tensor, keys: Tensor, values: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    out, total = _empty_attention(q, first, lse)
    batch, _, length, _ = q.shape
    with torch.cuda.device_of(q):
        _add_later_keys_kernel[(length, batch * keys.shape[1])](
            q,
            first,
            lse,
            keys,
            values,
            out,
            total,
            *q.stride()[:3],
            *first.stride()[:3],
            keys.shape[2],
            scale,
            **_launch_settings(q, keys),
        )
    return out, total


@_launch_add_later_keys.register_fake
def _empty_attention(q: Tensor, first: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Allocate the output, laid out as [B, T, H, D], and its log-sum-exps."""
    batch, heads, length, size = q.shape
    return q.new_empty(batch, length, heads, size).transpose(1, 2), torch.empty_like(lse)


@torch.library.custom_op("spectrain::later_gradients", mutates_args={"grad_q"})
def _launch_later_gradients(
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    total: Tensor,
    keys: Tensor,
    values: Tensor,
    grad_q: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    grad_keys, grad_values = _empty_gradients(grad, q, out, total, keys)
    batch, _, length, _ = q.shape
    with torch.cuda.device_of(q):
        _later_gradient_kernel[(length, batch * keys.shape[1])](
            grad,
            q,
            out,
            total,
            keys,
            values,
            grad_q,
            grad_keys,
            grad_values,
            *grad.stride()[:3],
            *q.stride()[:3],
            *out.stride()[:3],
            *grad_q.stride()[:3],
            keys.shape[2],
            scale,
            **_launch_settings(q, keys),
        )
    return grad_keys, grad_values


@_launch_later_gradients.register_fake
def _empty_gradients(
    grad: Tensor, q: Tensor, out: Tensor, total: Tensor, keys: Tensor, *args: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(keys), torch.empty_like(keys)


def _row_major(heads: Tensor) -> Tensor:
    """Return heads [B, H, T, D] whose numbers follow each other."""
    return heads if heads.stride(-1) == 1 else heads.contiguous()


def add_later_keys(
    q: Tensor, first: Tensor, lse: Tensor, keys: Tensor, values: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Do what `add_later_keys_reference` does, in one launch where the kernel runs, which computes
    the shares again in the backward pass.
    """
    if not takes_gradients(q):
        return add_later_keys_reference(q, first, lse, keys, values, scale)
    parts = _row_major(q), _row_major(first), lse.contiguous()
    out, total = _launch_add_later_keys(*parts, keys.contiguous(), values.contiguous(), scale)
    return out, total, None


def later_gradients(
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    log_sums: tuple[Tensor, Tensor | None],
    keys: Tensor,
    values: Tensor,
    grad_q: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `later_gradients_reference` does, given the log-sum-exps and shares that
    `add_later_keys` returned. Where the kernel runs, `grad_q` is written to.
    """
    total, share = log_sums
    if share is not None:
        return later_gradients_reference(grad, q, out, share, keys, values, grad_q, scale)
    grad_q = _row_major(grad_q)
    parts = [_row_major(part) for part in (grad, q, out)]
    rest = total, keys.contiguous(), values.contiguous(), grad_q, scale
    return grad_q, *_launch_later_gradients(*parts, *rest)
