"""EAGLE's layer in few calls for drafting on a CPU: the computation of its modules in float32 on
packed linears.

A level of a tree has a few rows. For a drafter's small layer, their products cost less than the
hundred operations and module calls around them. Shapes: B batch, F nodes, D width, H query heads, K
key-value heads, d head size, V draft vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.drafters.layers.llama_layer import Attention, Mlp
from spectrain.models.attention import causal_attention
from spectrain.models.fast import is_packed, packed_product, shared_input
from spectrain.models.kv_cache import TreeCache

from .fused_layers import CachedRotation, shared_product


class EagleModules(Protocol):
    """The modules of an EAGLE drafter and the variants that it has
    (`eagle_layers.EagleDrafter`).
    """

    self_attn: Attention
    mlp: Mlp
    input_layernorm: nn.RMSNorm
    hidden_norm: nn.RMSNorm
    post_attention_layernorm: nn.RMSNorm
    norm: nn.RMSNorm
    lm_head: nn.Linear
    lm_down: nn.Linear | None
    later: nn.ModuleList
    rotary: Any
    norm_before_residual: bool
    norm_output: bool

    def embed_inputs(self, tokens: Tensor) -> Tensor: ...


def uses_fused_cpu(drafter: EagleModules) -> bool:
    """Tell whether a drafter is one layer without variants on packed linears, outside of
    training.
    """
    if (
        not is_packed(drafter.lm_head)
        or torch.is_grad_enabled()
        or drafter.lm_head.weight.device.type != "cpu"
    ):
        return False
    attention = drafter.self_attn
    mlp = drafter.mlp
    if (
        len(drafter.later)
        or drafter.norm_before_residual
        or drafter.norm_output
        or drafter.lm_down is not None
    ):
        return False
    if (
        type(attention) is not Attention
        or type(mlp) is not Mlp
        or attention.window is not None
        or torch.compiler.is_compiling()
    ):
        return False
    # Layers with adapters are not packed.
    are_packed = is_packed(attention.o_proj) and is_packed(mlp.down_proj)
    return are_packed and all(
        shared_input(linear) is not None for linear in (attention.q_proj, mlp.up_proj)
    )


def run_layer(
    drafter: EagleModules,
    tokens: Tensor,
    hidden: Tensor,
    positions: Tensor,
    cache: TreeCache,
    visible: Tensor | None,
) -> Tensor:
    """Compute `EagleDrafter.run`: [B, F, D]."""
    attention = drafter.self_attn
    hidden = hidden.float()
    embedded = _apply_norm(drafter.input_layernorm, drafter.embed_inputs(tokens).float())
    x = torch.cat([embedded, _apply_norm(drafter.hidden_norm, hidden)], dim=-1)
    heads = shared_product(attention.q_proj, x).unflatten(-1, (-1, attention.head_dim))
    num_keys = attention.k_proj.out_features // attention.head_dim
    rotated = CachedRotation()(heads[:, :, :-num_keys], drafter.rotary(x, positions)).transpose(
        1, 2
    )
    q = rotated[:, :-num_keys]
    k = rotated[:, -num_keys:]
    v = heads[:, :, -num_keys:].transpose(1, 2)
    hidden = hidden + packed_product(
        attention.o_proj, _attend_cached(q, k, v, cache, visible).transpose(1, 2).flatten(2)
    )
    cache.add_uncommitted(tokens.shape[1])
    mlp = drafter.mlp
    inner = shared_product(mlp.gate_proj, _apply_norm(drafter.post_attention_layernorm, hidden))
    gate, up = inner.chunk(2, dim=-1)
    return hidden + packed_product(mlp.down_proj, F.silu(gate) * up)


def log_q(drafter: EagleModules, hidden: Tensor) -> Tensor:
    """Compute `EagleDrafter.log_q`: [B, F, V]."""
    return packed_product(drafter.lm_head, _apply_norm(drafter.norm, hidden.float())).log_softmax(
        -1
    )


def _apply_norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, norm.normalized_shape, norm.weight.float(), norm.eps)


def _attend_cached(
    q: Tensor, k: Tensor, v: Tensor, cache: TreeCache, visible: Tensor | None
) -> Tensor:
    """Compute `Attention.attend_cached` before its output projection: [B, H, F, d]."""
    if visible is None and cache.is_empty:
        cache.write(0, k, v)
        return causal_attention(q, k, v)
    if visible is None:
        length = q.shape[2]
        visible = (
            torch.ones(length, length, dtype=torch.bool, device=q.device)
            .tril()
            .expand(len(q), -1, -1)
        )
    return cache.attend_new(0, q, k, v, visible)
