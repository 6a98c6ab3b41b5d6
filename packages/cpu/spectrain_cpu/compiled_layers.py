"""Fused decoder layers on a CPU: four linears, and between them compiled kernels.

They compute what `FusedLayer` computes for the nodes of a tree or a single token: bit by bit in
bfloat16, and in float32 with bits that do not depend on the other nodes. A layer keeps the
addresses of its weights, so a forward has no other operations.
Shapes: N nodes, D width, H query heads, K key-value heads, d head size, I inner width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spectrain.kernels.tree_attention import Visibility
from spectrain.models.compiled_layers import mark_layer_done
from spectrain.models.fast import shared_input
from spectrain.models.kv_cache import TreeCache

from .attention import attention_memory, select_attention
from .blockers import AttentionFunction, find_call_blocker
from .fused_layers import CachedRotation, FusedLayer
from .packed_product import PackedProduct
from .rows import norm_lanes, select_rows, silu_table
from .team import current_team


class NodeBuffers:
    """What the layers of one forward over N nodes share: the inputs of their linears, and what
    kernels are told of the tree, of the angles and of the cache."""

    def __init__(
        self,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        cache: TreeCache,
        visibility: Visibility,
        layer: LayerKernels,
    ) -> None:
        num_rows = hidden.shape[1]
        size = layer.head_size
        num_texts, num_nodes, num_appended = visibility.tree.shape
        self.copies = 2 if num_rows == 1 and layer.has_paired_rows else 1
        self.normed, self.first_sum, self.second_sum = (torch.empty_like(hidden) for _ in range(3))
        self.attended = hidden.new_empty(1, num_rows, layer.num_heads * size)
        self.inner = hidden.new_empty(1, num_rows * self.copies, layer.inner_width)
        # Working memory, also of the norms.
        self.memory = attention_memory(visibility, layer.num_heads, layer.num_key_heads, size)
        self.scratch = self.memory.data_ptr(), self.memory.stride(0) * self.memory.itemsize
        self.team = current_team().address, len(self.memory)
        storage = cache.lend_storage(num_nodes, layer.num_key_heads, size, hidden.dtype)
        assert storage.dtype == hidden.dtype
        self.angles = [angle.contiguous() for angle in angles]
        self.keys = storage[0, 0].data_ptr()
        self.values = storage[0, 1].data_ptr()
        self.layer_bytes = storage.stride(0) * storage.element_size()
        # The arguments of the attention kernel before and after the addresses of a layer's keys and
        # values, but its scale.
        width = (layer.num_heads + 2 * layer.num_key_heads) * size
        self.before = [width, size, *(angle.data_ptr() for angle in self.angles)]
        self.mask = visibility.tree.contiguous()
        self.starts = cache.row_starts()
        self.lengths = visibility.lengths.contiguous()
        self.after = [
            storage.stride(3),
            self.starts.data_ptr(),
            self.lengths.data_ptr(),
            num_texts,
            num_appended,
            self.mask.data_ptr(),
            num_nodes,
            layer.num_heads,
            layer.num_key_heads,
            size,
            self.attended.data_ptr(),
        ]


class LayerKernels:
    """The kernels and linears of one layer."""

    def __init__(self, layer: Any) -> None:
        attention = layer.self_attn
        mlp = layer.mlp
        norms = layer.input_layernorm, layer.post_attention_layernorm
        qkv = shared_input(attention.q_proj)
        gate_up = shared_input(mlp.gate_proj)
        assert qkv is not None and gate_up is not None
        output = attention.o_proj.forward.weights
        down = mlp.down_proj.forward.weights
        self.products = [
            PackedProduct(weights) for weights in (qkv.weights, output, gate_up.weights, down)
        ]
        self.index = attention.layer_idx
        self.head_size = attention.head_dim
        self.scale = attention.scaling
        self.num_heads, self.num_key_heads = (size // self.head_size for size in qkv.sizes[:2])
        self.inner_width = mlp.gate_proj.out_features
        self.has_paired_rows = PackedProduct.is_paired(mlp.down_proj.weight)
        self.eps = norms[0].variance_epsilon
        self.norm_weights = [norm.weight for norm in norms]
        # Norms of queries and keys, as in Qwen3.
        self.head_norms = (
            [attention.q_norm, attention.k_norm]
            if getattr(attention, "q_norm", None) is not None
            else []
        )
        dtype = self.norm_weights[0].dtype
        self.attend_texts = select_attention(dtype)
        self.kernels = select_rows(dtype)
        self.lanes = norm_lanes()
        # The activations of all numbers, where these are few enough.
        self.table = silu_table() if dtype == torch.bfloat16 else None

    def run(
        self, hidden: Tensor, added: Tensor | None, buffers: NodeBuffers
    ) -> tuple[Tensor, Tensor]:
        """Run the layer on hidden + added [1, N, D]. Return two terms of its output: one of the
        buffers, and [1, N, D] that may be followed by copies."""
        qkv, output, gate_up, down = self.products
        first, second = self.norm_weights
        if added is None:
            add_norm(hidden, None, first, self.eps, hidden, buffers)
        else:
            add_norm(hidden, added, first, self.eps, buffers.first_sum, buffers)
            hidden = buffers.first_sum
        self._attend(qkv(buffers.normed), buffers)
        add_norm(hidden, output(buffers.attended), second, self.eps, buffers.second_sum, buffers)
        inner = gate_up(buffers.normed)
        out = buffers.inner
        sizes = hidden.shape[1], self.inner_width
        if self.table is None:
            self.kernels.gate(inner.data_ptr(), out.data_ptr(), *sizes)
        else:
            self.kernels.gate(
                inner.data_ptr(), self.table.data_ptr(), out.data_ptr(), *sizes, buffers.copies
            )
        return buffers.second_sum, down(out)

    def _attend(self, heads: Tensor, buffers: NodeBuffers) -> None:
        """Rotate heads [1, N, (H + 2 K) d], append keys and values to the cache, and attend."""
        mark_layer_done(self.index)
        shift = self.index * buffers.layer_bytes
        if self.head_norms:
            self._norm_heads(heads, buffers)
        self.attend_texts(
            heads.data_ptr(),
            *buffers.before,
            buffers.keys + shift,
            buffers.values + shift,
            *buffers.after,
            self.scale,
            *buffers.scratch,
            0,
            *buffers.team,
        )

    def _norm_heads(self, heads: Tensor, buffers: NodeBuffers) -> None:
        query_norm, key_norm = self.head_norms
        self.kernels.norm_heads(
            heads.data_ptr(),
            query_norm.weight.data_ptr(),
            key_norm.weight.data_ptr(),
            heads.shape[1],
            self.num_heads,
            self.num_key_heads,
            self.head_size,
            query_norm.variance_epsilon,
            self.lanes,
            buffers.memory.data_ptr(),
        )


def add_norm(
    hidden: Tensor,
    added: Tensor | None,
    weight: Tensor,
    eps: float,
    summed: Tensor,
    buffers: NodeBuffers,
) -> None:
    """Store hidden + added [1, N, D] in `summed`, and its norm in the buffer for that."""
    _, rows, width = hidden.shape
    select_rows(hidden.dtype).add_norm(
        hidden.data_ptr(),
        0 if added is None else added.data_ptr(),
        weight.data_ptr(),
        summed.data_ptr(),
        buffers.normed.data_ptr(),
        rows,
        width,
        eps,
        norm_lanes(),
        buffers.memory.data_ptr(),
    )


def flatten_texts(hidden: Tensor) -> Tensor:
    """Return the nodes of all texts [B, N, D] after each other, [1, B N, D], contiguous as
    kernels read them.
    """
    return hidden.reshape(1, -1, hidden.shape[-1]).contiguous()


def join_terms(hidden: Tensor, added: Tensor) -> Tensor:
    """Return the sum [1, N, D] of what a layer returned; the second term may repeat its row."""
    return hidden + added[:, : hidden.shape[1]]


class CompiledLayer(FusedLayer):
    """The forward of a layer: by kernels where they serve the call, else in torch's operations."""

    def __init__(self, layer: Any, rotation: CachedRotation, attend: AttentionFunction) -> None:
        super().__init__(layer, rotation, attend)
        self.layer_kernels = LayerKernels(layer)

    def run(
        self,
        hidden_states: Tensor,
        mask: Tensor | None,
        angles: tuple[Tensor, Tensor],
        kwargs: dict[str, Any],
    ) -> Tensor:
        if find_call_blocker(kwargs) is not None:
            return super().run(hidden_states, mask, angles, kwargs)
        cache = kwargs["tree_cache"]
        visibility = kwargs["visibility"]
        rows = flatten_texts(hidden_states)
        buffers = NodeBuffers(rows, angles, cache, visibility, self.layer_kernels)
        summed, added = self.layer_kernels.run(rows, None, buffers)
        return join_terms(summed, added).view(hidden_states.shape)
