"""Layers of heads on the target's last state, which several ideas use.

Shapes: B batch, T tokens, R rows, D target width, K heads or slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spectrain.drafters.layers.llama_layer import Attention, Mlp, Rotary, llama_config
from spectrain.drafters.layers.output_layer import init_output_layer
from spectrain.drafters.layers.vocabulary import VocabularyDrafter
from spectrain.kernels.fused_attention import fused_attention
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target


class PrefixAttention(nn.Module):
    """A decoder layer over the target's states, so that heads see more than the last one (Hydra++,
    Ankner et al., 2024, section 4.3). Its output projections are zero at first, so that it starts
    as the identity.
    """

    def __init__(self, target: Target) -> None:
        super().__init__()
        config = llama_config(target)
        self.input_layernorm = nn.RMSNorm(target.width, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, target.width)
        self.post_attention_layernorm = nn.RMSNorm(target.width, eps=config.rms_norm_eps)
        self.mlp = Mlp(config)
        self.rotary = Rotary(config)
        nn.init.zeros_(self.self_attn.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)

    def forward(
        self,
        final: Tensor,
        positions: Tensor,
        cache: TreeCache | None = None,
        lengths: tuple[int, ...] | None = None,
        layer: int = 0,
    ) -> Tensor:
        """Transform states [B, T, D] by causal attention, inside packed documents of these lengths.

        With a cache, the states also attend to its entries of `layer`, and the caller advances the
        cache.
        """
        q, k, v = self.self_attn.project_qkv(
            self.input_layernorm(final), self.rotary(final, positions)
        )
        if cache is None:
            attended = self.self_attn.attend_causal(q, k, v, lengths)
        else:
            attended = self.self_attn.attend_cached(q, k, v, cache, None, layer)
        hidden = final + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class HeadAttention(nn.Module):
    """An encoder layer over the states of all heads at one position (Amphista, section 3.2). Its
    output projections are zero at first, so that it starts as the identity."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        config = llama_config(target)
        self.head_dim = config.head_dim
        self.input_layernorm = nn.RMSNorm(target.width, eps=config.rms_norm_eps)
        self.qkv_proj = nn.Linear(
            target.width, 3 * config.num_attention_heads * config.head_dim, bias=False
        )
        self.o_proj = nn.Linear(
            config.num_attention_heads * config.head_dim, target.width, bias=False
        )
        self.post_attention_layernorm = nn.RMSNorm(target.width, eps=config.rms_norm_eps)
        self.mlp = Mlp(config)
        nn.init.zeros_(self.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Transform states [R, K, D]; every head attends to all heads."""
        parts = self.qkv_proj(self.input_layernorm(x)).unflatten(-1, (3, -1, self.head_dim))
        q, k, v = parts.permute(2, 0, 3, 1, 4)  # [R, H, K, head size]
        attended = fused_attention(q, k, v)
        x = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class HeadMixer(nn.Module):
    """Adds a learned vector per head, zero at first, to heads' states, and mixes them by attention;
    without layers, does nothing."""

    def __init__(self, target: Target, num_heads: int, num_layers: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(num_heads, target.width)) if num_layers else None
        self.layers = nn.ModuleList(HeadAttention(target) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """Transform states [R, K, D]."""
        if self.places is not None:
            x = x + self.places
        for layer in self.layers:
            x = layer(x)
        return x


@torch.no_grad()
def make_state_projection(width: int) -> nn.Linear:
    """Make a projection of a concatenated state and embedding [.., 2 D], which at first passes
    on the state.
    """
    fuse = nn.Linear(2 * width, width, bias=False)
    fuse.weight.zero_()
    fuse.weight[:, :width].fill_diagonal_(1.0)
    return fuse


class StagedAdapter(nn.Module):
    """Stages of layers over the target's states and the embeddings of the next tokens (Amphista,
    section 3.3).

    Some heads begin after each stage. The adapter starts as the identity.
    """

    def __init__(self, target: Target, num_stages: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(target.width) if num_stages else None
        self.fuse = nn.ModuleList(make_state_projection(target.width) for _ in range(num_stages))
        self.layers = nn.ModuleList(PrefixAttention(target) for _ in range(num_stages))

    def forward(
        self,
        final: Tensor,
        embedded: Tensor,
        positions: Tensor,
        cache: TreeCache | None = None,
        lengths: tuple[int, ...] | None = None,
    ) -> list[Tensor]:
        """Return the states [B, T, D] of every stage, or the target's own if there is no stage."""
        states = []
        x = final
        next_tokens = embedded if self.norm is None else self.norm(embedded)
        for index, (fuse, layer) in enumerate(zip(self.fuse, self.layers)):
            x = layer(fuse(torch.cat([x, next_tokens], dim=-1)), positions, cache, lengths, index)
            states.append(x)
        if cache is not None:
            cache.add_uncommitted(final.shape[1])
        return states or [final]


class SharedHeadDrafter(VocabularyDrafter):
    """A drafter whose slots or heads share one output layer (`lm_down`, `lm_head`), which starts
    as the target's.
    """

    lm_down: Any  # nn.Linear | None
    lm_head: Any  # nn.Linear

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Choose the draft vocabulary and copy the target's output layer."""
        ids = self.choose_vocabulary(token_counts)
        init_output_layer(self.lm_down, self.lm_head, self.head.output.weight[ids])
