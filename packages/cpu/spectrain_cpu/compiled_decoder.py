"""A whole decoder on a CPU, from tokens to its final norm, in the calls of its compiled layers
alone.

It serves the forwards of decoding: the nodes of a tree or a single token over a cache. Shapes: N
nodes, D width, d head size.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from spectrain.models.forward_override import override_forwards
from spectrain.models.residual_stream import only_reads_input
from spectrain_cpu.block_weights import BlockWeight

from .available import has_cpu_kernels
from .blockers import AttentionFunction
from .compiled_layers import (
    CompiledLayer,
    LayerKernels,
    NodeBuffers,
    add_norm,
    flatten_texts,
    join_terms,
)
from .fused_layers import CachedRotation

if TYPE_CHECKING:
    from .joined_layers import BlockLayers

ANGLES_STEP = 128
"""Positions whose angles are computed together: few enough that torch computes all in vectors,
on one thread.
"""

GET_FORWARD = operator.methodcaller("get", "forward")
GET_VERSION = operator.attrgetter("_version")
GET_PACKED = operator.attrgetter("packed")


class CompiledDecoder:
    """The forward of a decoder whose layers are all compiled."""

    def __init__(self, decoder: Any, attend: AttentionFunction) -> None:
        self.config = decoder.config
        self.layers = list(decoder.layers)
        self.embedding = decoder.embed_tokens
        self.norm = decoder.norm
        self.rotary = decoder.rotary_emb
        rotation = CachedRotation()
        self.forwards = [CompiledLayer(layer, rotation, attend) for layer in self.layers]
        self.cos = self.sin = self.norm.weight.new_empty(0, 0)
        # What must stay as it is: the forwards of modules, and the weights that were packed or
        # whose addresses are used.
        inner = [
            module for layer in self.layers for module in layer.modules() if module is not layer
        ]
        inner += [self.embedding, self.norm, self.rotary]
        self.attributes = [vars(module) for module in (*inner, *self.layers)]
        self.overrides = [attributes.get("forward") for attributes in self.attributes]
        self.hooks = [
            hooks
            for module in inner
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        parameters = [(module._parameters, name) for module in inner for name in module._parameters]
        self.tables, self.names = zip(
            *[(table, name) for table, name in parameters if table[name] is not None]
        )
        self.weights = [table[name] for table, name in zip(self.tables, self.names)]
        # Weights in the blocks of a GGUF file cannot be written to.
        self.written = [weight for weight in self.weights if not isinstance(weight, BlockWeight)]
        self.versions = list(map(GET_VERSION, self.written))
        products = [
            product for forward in self.forwards for product in forward.layer_kernels.products
        ]
        self.sources = [product.source for product in products]
        self.packed = [product.weight for product in products]
        self.block_layers = join_layers([forward.layer_kernels for forward in self.forwards])

    def is_current(self, attend: AttentionFunction) -> bool:
        """Return whether the layers still compute what was compiled; called at every forward, so
        made of quick comparisons.
        """
        weight = self.norm.weight
        return (
            has_cpu_kernels(weight.dtype, weight.device)
            and ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation) is attend
            and not any(self.hooks)
            and all(map(operator.is_, map(GET_FORWARD, self.attributes), self.overrides))
            and all(map(operator.is_, map(operator.getitem, self.tables, self.names), self.weights))
            and list(map(GET_VERSION, self.written)) == self.versions
            and all(map(operator.is_, map(GET_PACKED, self.sources), self.packed))
        )

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, tree_cache: Any = None, **kwargs: Any
    ) -> BaseModelOutputWithPast:
        """Run the decoder over tokens [B, N] with the arguments of its own forward."""
        embedded: Tensor = F.embedding(input_ids, self.embedding.weight)
        shape = embedded.shape
        hidden = flatten_texts(embedded)
        angles = self._angles(position_ids, tree_cache.max_length, hidden)
        buffers = NodeBuffers(
            hidden, angles, tree_cache, kwargs["visibility"], self.forwards[0].layer_kernels
        )
        added = None
        index = 0
        while index < len(self.layers):
            layer = self.layers[index]
            end = index + 1
            if has_hooks(layer):
                hidden = hidden if added is None else join_terms(hidden, added)
                added = None
            if not only_reads_input(layer):
                with override_forwards([(layer, self.forwards[index])]):
                    hidden = layer(
                        hidden.view(shape),
                        position_embeddings=angles,
                        tree_cache=tree_cache,
                        **kwargs,
                    )
                hidden = flatten_texts(hidden)
            else:
                for hook in layer._forward_pre_hooks.values():
                    hook(layer, (hidden.view(shape),), {})
                while end < len(self.layers) and not has_hooks(self.layers[end]):
                    end += 1
                hidden, added = self._run_layers(index, end, hidden, added, buffers)
            index = end
        add_norm(
            hidden, added, self.norm.weight, self.norm.variance_epsilon, buffers.first_sum, buffers
        )
        return BaseModelOutputWithPast(last_hidden_state=buffers.normed.view(shape))

    def _run_layers(
        self, first: int, end: int, hidden: Tensor, added: Tensor | None, buffers: NodeBuffers
    ) -> tuple[Tensor, Tensor]:
        """Run the layers from `first` to before `end`, none of which has hooks that are still to
        be called, on hidden + added [1, N, D]; return two terms of their output.
        """
        if self.block_layers is not None:
            return self.block_layers.run(first, end, hidden, added, buffers)
        for forward in self.forwards[first:end]:
            hidden, added = forward.layer_kernels.run(hidden, added, buffers)
        assert added is not None
        return hidden, added

    def _angles(self, positions: Tensor, max_length: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [B, N, d] at positions [B, N] below `max_length`."""
        if len(self.cos) < max_length:
            every = torch.arange(-(-max_length // ANGLES_STEP) * ANGLES_STEP)
            parts = [self.rotary(hidden, part[None]) for part in every.split(ANGLES_STEP)]
            self.cos, self.sin = (torch.cat(halves, dim=1)[0] for halves in zip(*parts))
        return F.embedding(positions, self.cos), F.embedding(positions, self.sin)


def has_hooks(layer: Any) -> bool:
    """Return whether something is called before or after a layer."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def join_layers(layers: list[LayerKernels]) -> BlockLayers | None:
    """Return what runs layers in one call, where their weights are in the blocks of a GGUF file."""
    weights = [linear.weight for linear in layers[0].products[0].source.linears]
    if not isinstance(weights[0], BlockWeight):
        return None
    # Only their kernels import gguf.
    from .joined_layers import BlockLayers

    return BlockLayers(layers) if BlockLayers.supports(layers) else None
