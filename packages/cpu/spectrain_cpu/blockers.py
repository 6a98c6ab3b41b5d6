"""When kernels compute a decoder, or fused operations a layer, in place of their modules: every
condition, with its reason.

They do so only where nothing but the time can differ:
1. The modules compute what the kernels compute: classes, types, widths, activations.
2. Nothing watches or replaces a part: there are no hooks but those of whole layers, no other
   forwards than those of packed linears, and no other attention than this project's. Kernels are
   switched on (`has_cpu_kernels`).
3. The weights are those that were packed. `CompiledDecoder.is_current` compares them at every
   forward.
4. The call runs nodes over a cache that lends its storage, by a mask that is the same for all
   layers, without gradients.

Each function returns why that is not so, as a clause about the target, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from spectrain.kernels.tree_attention import Visibility
from spectrain.models.fast import is_packed, shared_input
from spectrain.models.limits import has_dynamic_rope

from .available import HEAD_STEP, MAX_WIDTH, has_cpu_kernels
from .packed_product import PackedProduct

# decoders that embed, run their layers, and norm
DECODERS = ("LlamaModel", "Qwen2Model", "Qwen3Model")
# layer classes with this arithmetic
LLAMA_LIKE_LAYERS = ("LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
VECTOR_WIDTHS = {torch.bfloat16: 32, torch.float32: 16}
"""Divisor of the inner width, so that all activations are computed in vectors: the last numbers
of others have other bits.
"""

AttentionFunction = Callable[..., tuple[Tensor, None]]
"""The attention of a layer, with the arguments of transformers' attention interface."""


def find_decoder_blocker(
    decoder: Any, layers: nn.ModuleList, attend: AttentionFunction
) -> str | None:
    """Return why kernels do not compute a whole decoder, from tokens to its final norm."""
    if type(decoder).__name__ not in DECODERS or decoder.layers is not layers:
        return f"a {type(decoder).__name__} is no decoder that kernels know"
    if has_dynamic_rope(decoder.config):
        return "its rotary angles depend on the length of the text"
    if type(decoder.embed_tokens) is not nn.Embedding:
        return "its embedding computes more than a lookup"
    outside = decoder.embed_tokens, decoder.norm, decoder.rotary_emb
    if any(_has_override(module) or _has_hooks(module) for module in outside):
        return "its embedding, final norm or rotary embedding is watched or replaced"
    return next(filter(None, (find_layer_blocker(layer, attend) for layer in layers)), None)


def find_layer_blocker(layer: Any, attend: AttentionFunction) -> str | None:
    """Return why kernels do not compute a layer."""
    return find_fusion_blocker(layer, attend) or _find_kernel_blocker(layer)


def find_fusion_blocker(layer: Any, attend: AttentionFunction) -> str | None:
    """Return why a layer does not run in few operations: it has to be like Llama's, on packed
    weights, and compute exactly what its class says."""
    if type(layer).__name__ not in LLAMA_LIKE_LAYERS:
        return f"a {type(layer).__name__} is no layer like Llama's"
    attention = layer.self_attn
    mlp = layer.mlp
    linears = (
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
    )
    if (
        not all(map(is_packed, linears))
        or shared_input(attention.q_proj) is None
        or shared_input(mlp.gate_proj) is None
    ):
        return "its linears are not packed, or have another forward"
    if layer.input_layernorm.weight.dtype not in VECTOR_WIDTHS:
        return "its norms are neither float32 nor bfloat16"
    if ALL_ATTENTION_FUNCTIONS.get(attention.config._attn_implementation) is not attend:
        return "its attention is replaced"
    inner = [module for module in layer.modules() if module is not layer]
    if any(_has_override(module) for module in (layer, *inner) if module not in linears):
        return "a part of its layers is replaced"
    return "a part of its layers is watched" if any(map(_has_hooks, inner)) else None


def _find_kernel_blocker(layer: Any) -> str | None:
    """Return why kernels do not compute a layer that can be fused."""
    attention = layer.self_attn
    mlp = layer.mlp
    weight = layer.input_layernorm.weight
    linears = attention.q_proj, attention.o_proj, mlp.gate_proj
    if not has_cpu_kernels(weight.dtype, weight.device) or not _has_norms():
        return "there are no kernels for its type on this machine, or they are switched off"
    if not all(map(PackedProduct.supports, (*linears, mlp.down_proj))):
        return "its weights are multiplied in another type than they are stored"
    if weight.shape[0] > MAX_WIDTH or attention.head_dim % HEAD_STEP:
        return f"it is wider than {MAX_WIDTH}, or its heads are no multiple of {HEAD_STEP}"
    if mlp.gate_proj.out_features % VECTOR_WIDTHS[weight.dtype]:
        return f"its inner width is no multiple of {VECTOR_WIDTHS[weight.dtype]}"
    if any(PackedProduct.is_paired(linear.weight) for linear in linears):
        return "a single row has other bits than several on this machine"
    if not (isinstance(mlp.act_fn, nn.SiLU) or type(mlp.act_fn).__name__ == "SiLUActivation"):
        return "its activation is not SiLU"
    return (
        "its layers attend within a window"
        if getattr(attention, "sliding_window", None) is not None
        else None
    )


def _has_norms() -> bool:
    """Return whether kernels norm rows in torch's order; call it where kernels can run."""
    from .rows import norm_lanes

    return norm_lanes() is not None


def find_call_blocker(arguments: dict[str, Any]) -> str | None:
    """Return why kernels do not serve a forward with these arguments of attention."""
    cache = arguments.get("tree_cache")
    visibility = arguments.get("visibility")
    if not isinstance(visibility, Visibility) or cache is None or visibility.chunk_size is not None:
        return "the forward runs no nodes over a cache, or within chunks"
    if any(arguments.get(name) is not None for name in ("ranges", "layer_visibility", "calls")):
        return "its layers attend differently"
    return (
        None
        if cache.can_lend_storage
        else "the keys and values that attention reads are watched or changed"
    )


def _has_override(module: nn.Module) -> bool:
    return "forward" in vars(module)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
