"""Fused decoder layers for the CPU: the results of transformers' own layers, bit by bit, in fewer calls.

On a CPU a layer of one row is some fifty small operations and as many module calls. Here queries, keys and values are rotated
together, a norm is one operation, and linears that read the same input are one product, whose parts are views. Shapes: B batch,
N tokens or nodes, D width, H query heads, K key-value heads, d head size, I inner width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import ATTENTION_NAME, layer_attention
from .forward_override import Forward
from .packed_linears import PackedLinear, SharedInput

LLAMA_LIKE_LAYERS = ("LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")  # layer classes with this arithmetic


def fuse_cpu_layers(layers: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, Forward]]:
    """Yield the layers that can be fused, each with its fused forward: those on packed linears, without hooks inside."""
    rotation = CachedRotation()
    for layer in layers:
        if type(layer).__name__ in LLAMA_LIKE_LAYERS and _is_fusable(layer):
            yield layer, partial(_run_layer, layer, rotation)


def _is_fusable(layer: Any) -> bool:
    """Return whether a layer computes exactly what its class says, on packed weights."""
    attention, mlp = layer.self_attn, layer.mlp
    norms = layer.input_layernorm, layer.post_attention_layernorm
    linears = (
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
    )
    if not all(isinstance(vars(linear).get("forward"), PackedLinear) for linear in linears):
        return False
    if attention.q_proj.forward.shared is None or mlp.gate_proj.forward.shared is None:
        return False
    if norms[0].weight.dtype not in (torch.float32, torch.bfloat16) or attention.config._attn_implementation != ATTENTION_NAME:
        return False
    if any("forward" in vars(module) for module in (layer, attention, mlp, *norms)):
        return False
    return not any(module._forward_hooks or module._forward_pre_hooks for module in (attention, mlp, *norms, *linears))


class CachedRotation:
    """The rotary angles of one forward, which all layers share."""

    def __init__(self) -> None:
        self.angles: tuple[Tensor, Tensor] | None = None

    def __call__(self, heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate [B, N, heads, d] by cosines and sines [B, N, d]: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
        if self.angles is not angles:
            self.angles = angles
            cos, sin = angles
            first, second = sin.chunk(2, dim=-1)
            self.cos, self.sin = cos[:, :, None], torch.cat([-first, second], dim=-1)[:, :, None]
        return heads * self.cos + heads.roll(heads.shape[-1] // 2, dims=-1) * self.sin


def _apply_norm(norm: Any, x: Tensor) -> Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)
    return norm.weight * F.rms_norm(
        x, (x.shape[-1],), None, norm.variance_epsilon
    )  # rounded before the weight, as in transformers


def shared_product(linear: Any, x: Tensor) -> Tensor:
    """Return the outputs [.., O] of all linears that read the same input as this packed one, side by side."""
    return _shared_input(linear).weights.product(x)


def _shared_input(linear: Any) -> SharedInput:
    shared: SharedInput = linear.forward.shared
    return shared


def _run_layer(
    layer: Any,
    rotation: CachedRotation,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> Tensor:
    """Run a layer, [B, N, D] -> [B, N, D], with the arguments of its own forward."""
    assert position_embeddings is not None
    attention, mlp = layer.self_attn, layer.mlp
    batch, length, _ = hidden_states.shape
    together = _shared_input(attention.q_proj)
    projected = together.weights.product(_apply_norm(layer.input_layernorm, hidden_states))
    heads = projected.view(batch, length, -1, attention.head_dim)
    num_keys = together.sizes[1] // attention.head_dim
    queries_keys, values = heads[:, :, :-num_keys], heads[:, :, -num_keys:]
    if getattr(attention, "q_norm", None) is not None:
        queries, keys = queries_keys[:, :, :-num_keys], queries_keys[:, :, -num_keys:]
        queries_keys = torch.cat([_apply_norm(attention.q_norm, queries), _apply_norm(attention.k_norm, keys)], dim=2)
    rotated = rotation(queries_keys, position_embeddings)
    window = getattr(attention, "sliding_window", None)
    attended = layer_attention(
        attention, rotated[:, :, :-num_keys].transpose(1, 2), rotated[:, :, -num_keys:].transpose(1, 2), values.transpose(1, 2),
        attention_mask, scaling=attention.scaling, sliding_window=window, **kwargs,
    )[0]  # fmt: skip
    hidden_states = hidden_states + attention.o_proj.forward.weights.product(attended.view(batch, length, -1))
    inner = _shared_input(mlp.gate_proj)
    gate, up = inner.weights.product(_apply_norm(layer.post_attention_layernorm, hidden_states)).split(inner.sizes, dim=-1)
    return hidden_states + mlp.down_proj.forward.weights.product(mlp.act_fn(gate) * up)
