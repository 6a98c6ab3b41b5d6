"""Fused decoder layers for the CPU: the results of transformers' own layers, bit by bit, in fewer
calls.

On a CPU a layer of one row is some fifty small operations and as many module calls. Here queries,
keys and values are rotated together, a norm is one operation, and linears that read the same input
are one product, whose parts are views. Shapes: B batch, N tokens or nodes, D width, H query heads,
K key-value heads, d head size, I inner width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.models.cache_arguments import drop_cache
from spectrain.models.fast import packed_product, shared_input
from spectrain.models.fast.packed_linears import SharedInput

from .blockers import AttentionFunction


class CachedRotation:
    """The rotary angles of one forward, which all layers share."""

    def __init__(self) -> None:
        self.angles: tuple[Tensor, Tensor] | None = None

    def __call__(self, heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate [B, N, heads, d] by cosines and sines [B, N, d]: (x1, x2) -> (x1 cos - x2 sin,
        x2 cos + x1 sin).
        """
        if self.angles is not angles:
            self.angles = angles
            cos, sin = angles
            first, second = sin.chunk(2, dim=-1)
            self.cos = cos[:, :, None]
            self.sin = torch.cat([-first, second], dim=-1)[:, :, None]
        return heads * self.cos + heads.roll(heads.shape[-1] // 2, dims=-1) * self.sin


def _apply_norm(norm: Any, x: Tensor) -> Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)
    # The result is rounded before the weight, as in transformers.
    return norm.weight * F.rms_norm(x, (x.shape[-1],), None, norm.variance_epsilon)


def shared_product(linear: Any, x: Tensor) -> Tensor:
    """Return the outputs [.., O] of all linears that read the same input as this packed one,
    side by side.
    """
    return _get_shared(linear).product(x)


def _get_shared(linear: Any) -> SharedInput:
    shared = shared_input(linear)
    assert shared is not None
    return shared


class FusedLayer:
    """The forward of a fused layer."""

    def __init__(self, layer: Any, rotation: CachedRotation, attend: AttentionFunction) -> None:
        self.layer, self.rotation, self.attend = layer, rotation, attend

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Run the layer, [B, N, D] -> [B, N, D], with the arguments of its own forward."""
        assert position_embeddings is not None
        # The cache among them is for the layer's own attention.
        return self.run(hidden_states, attention_mask, position_embeddings, drop_cache(kwargs))

    def run(
        self,
        hidden_states: Tensor,
        mask: Tensor | None,
        angles: tuple[Tensor, Tensor],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Run the layer with the cosines and sines of the positions; `kwargs` are the arguments
        of its attention.
        """
        attended = self._attend(hidden_states, mask, angles, kwargs)
        hidden_states = hidden_states + packed_product(self.layer.self_attn.o_proj, attended)
        mlp = self.layer.mlp
        gate_up = _get_shared(mlp.gate_proj)
        inner = gate_up.product(_apply_norm(self.layer.post_attention_layernorm, hidden_states))
        gate, up = inner.split(gate_up.sizes, dim=-1)
        return hidden_states + packed_product(mlp.down_proj, mlp.act_fn(gate) * up)

    def _attend(
        self,
        hidden_states: Tensor,
        mask: Tensor | None,
        angles: tuple[Tensor, Tensor],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Compute the attention of the layer before its output projection, [B, N, H d]."""
        attention = self.layer.self_attn
        batch, length, _ = hidden_states.shape
        qkv = _get_shared(attention.q_proj)
        heads = qkv.product(_apply_norm(self.layer.input_layernorm, hidden_states)).view(
            batch, length, -1, attention.head_dim
        )
        num_keys = qkv.sizes[1] // attention.head_dim
        queries_keys = heads[:, :, :-num_keys]
        values = heads[:, :, -num_keys:]
        if getattr(attention, "q_norm", None) is not None:
            queries = queries_keys[:, :, :-num_keys]
            keys = queries_keys[:, :, -num_keys:]
            queries_keys = torch.cat(
                [_apply_norm(attention.q_norm, queries), _apply_norm(attention.k_norm, keys)], dim=2
            )
        rotated = self.rotation(queries_keys, angles)
        q, k, v = (
            x.transpose(1, 2)
            for x in (rotated[:, :, :-num_keys], rotated[:, :, -num_keys:], values)
        )
        window = getattr(attention, "sliding_window", None)
        attended, _ = self.attend(
            attention, q, k, v, mask, scaling=attention.scaling, sliding_window=window, **kwargs
        )
        return attended.view(batch, length, -1)
