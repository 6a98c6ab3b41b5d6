"""Blocks that families share. Shapes: B batch, T tokens, H query heads, K key-value heads, D head size, W width."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from spectrain.models.attention import causal_attention
from spectrain.models.compiled_layers import attend_with_cache
from spectrain.models.kv_cache import DEFAULT_OPTIONS, AttentionOptions
from spectrain.models.limits import max_text_length

if TYPE_CHECKING:
    from spectrain.models.kv_cache import TreeCache
    from spectrain.models.target import Target


def llama_layer_settings(config: Any) -> dict[str, Any]:
    """Settings of one Llama layer with the width, heads and rotary embedding of a model's (text) configuration."""
    heads = num_heads(config)
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in rope and "rope_type" not in rope:  # one entry per kind of layer: take full attention's
        rope = rope.get("full_attention", {})
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": ffn_size(config),
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": head_size(config),
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
        "max_position_embeddings": max_text_length(config),
        **({"rope_parameters": dict(rope)} if rope else {}),
    }


def num_heads(config: Any) -> int:
    """Of a model's attention; of one that has none, heads of 64."""
    return getattr(config, "num_attention_heads", None) or max(1, config.hidden_size // 64)


def ffn_size(config: Any) -> int:
    """The width of a feed-forward half, whatever a model calls it; four times its own where there is none, or one a layer."""
    named = [getattr(config, name, None) for name in ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")]
    return next((size for size in named if isinstance(size, int)), 4 * config.hidden_size)


def head_size(config: Any) -> int:
    """Of an attention head; of layers with unlike heads, the configuration's own entry."""
    size = config.to_dict().get("head_dim") or config.hidden_size // num_heads(config)
    return size + size % 2  # rotary embeddings turn pairs


def llama_config(target: Target, changes: dict[str, Any] | None = None) -> LlamaConfig:
    """One Llama layer of the target's width, heads and rotary embedding: the shape that engines expect of a drafter."""
    layer = {**llama_layer_settings(target.config), **(changes or {})}
    return LlamaConfig(num_hidden_layers=1, vocab_size=target.head.vocab_size, **layer)


class Attention(nn.Module):
    """Rotary attention over `in_width` inputs, with grouped key-value heads; with a window over so many positions back."""

    def __init__(self, config: LlamaConfig, in_width: int, window: int | None = None) -> None:
        super().__init__()
        self.head_dim, self.window = config.head_dim, window
        self.q_proj = nn.Linear(in_width, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(in_width, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(in_width, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)

    def project_qkv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, D], keys and values [B, K, T, D], positions already rotated in."""
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *rope)
        return q.to(v.dtype), k.to(v.dtype), v  # under autocast the rotary product comes out wider

    def project_output(self, attended: Tensor) -> Tensor:
        """[B, H, T, D] -> [B, T, W]"""
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def attend_causal(self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...] | None = None) -> Tensor:
        """Attention in training: causal, in each of packed documents of these lengths by itself."""
        return self.project_output(causal_attention(q, k, v, lengths, window=self.window))

    def attend_cached(
        self, q: Tensor, k: Tensor, v: Tensor, cache: TreeCache, visible: Tensor | None, layer: int = 0
    ) -> Tensor:
        """Attention in decoding: append to the cache, see its committed tokens and the nodes in `visible` [B, T, M], or
        without it the new tokens up to the own one. With a window the cache knows where new nodes stand (`place`)."""
        batch, _, length, _ = q.shape
        if visible is None and cache.is_empty:
            cache.append(layer, k, v)
            return self.attend_causal(q, k, v)
        if visible is None:
            visible = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().expand(batch, -1, -1)
        return self.project_output(
            append_and_attend(q, k, v, cache, visible, layer, AttentionOptions(window=self.window), cache.positions)
        )


def append_and_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: TreeCache,
    visible: Tensor,
    layer: int,
    rules: AttentionOptions = DEFAULT_OPTIONS,
    positions: Tensor | None = None,
) -> Tensor:
    """[B, H, N, D] of the newest nodes, appended to a drafter's cache with what stands before them; compiled or not."""
    if torch.compiler.is_compiling():
        return attend_with_cache(q, k, v, visible, cache, layer, rules, positions).transpose(1, 2)
    return cache.attend_new(layer, q, k, v, visible, rules, positions)


class NormedAttention(Attention):
    """Qwen3's: queries and keys are normed head by head before positions are rotated in. It may read keys and values of a
    context that has no queries."""

    def __init__(self, config: LlamaConfig, in_width: int, window: int | None = None) -> None:
        super().__init__(config, in_width, window)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def project_qkv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        k, v = self.project_kv(x, rope)
        return apply_rotary(q, rope).to(v.dtype), k, v

    def project_kv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, T, D] of a context [B, T, W]."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return apply_rotary(k, rope).to(v.dtype), v


def apply_rotary(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """[B, H, T, D] with positions rotated in."""
    cos, sin = (part[:, None] for part in rope)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Mlp(nn.Module):
    """Llama's gated feed-forward block."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ResBlock(nn.Module):
    """x + SiLU(W x + b), with W and b zero at first: it starts as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


def make_rotary(config: LlamaConfig) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The rotary embedding of a configuration: cosines and sines from a tensor (for its dtype) and position ids.

    Not a submodule of the drafter, for casting one to bfloat16 would round its frequencies; so it follows by itself to where
    the drafter is, once: a copy from the host in every forward would make a GPU wait, and a CUDA graph refuses it.
    """
    module = LlamaRotaryEmbedding(config)

    def rotate(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if module.inv_freq.device != x.device:
            module.to(x.device)
        return module(x, position_ids)

    return rotate


@torch.no_grad()
def init_from_target(fc: nn.Linear, norm: nn.RMSNorm, target: Target) -> None:
    """Pass the last of the fused layers on, as it is, and norm as the target's final norm does."""
    fc.weight.zero_()
    fc.weight[:, -target.width :].fill_diagonal_(1.0)
    scale = final_norm_scale(target)
    if scale is not None:
        norm.weight.copy_(scale)


@torch.no_grad()
def final_norm_scale(target: Target) -> Tensor | None:
    """What the target's final norm multiplies by, [W], however it is stored; None where it is no RMS norm."""
    ones = torch.ones(1, 1, target.width, device=target.device, dtype=target.dtype)
    above, below = (target.apply_final_norm(sign * ones)[0, 0].float() for sign in (1, -1))
    if not torch.allclose(above, -below) or not above.any():
        return None
    return above * (1 + getattr(target.config, "rms_norm_eps", 1e-6)) ** 0.5
