"""One decoder layer of the target's kind and a final norm, of any architecture: latent attention,
experts, norms of 1 + w.

The module is the target's decoder class with one layer and no embedding, so that its rotary
embedding and norms are the target's. The drafter computes the attention. Shapes: B batch, T tokens,
D width, H heads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.errors import UserError, first_line
from spectrain.models.architectures.mtp import mtp_layer_types
from spectrain.models.attention import ATTENTION_NAME, causal_attention
from spectrain.models.cache_arguments import cache_argument
from spectrain.models.cache_types import AttentionOptions
from spectrain.models.kv_cache import TreeCache
from spectrain.models.model_parts import find_layers, layer_list_name
from spectrain.models.target import Target
from spectrain.models.weight_block import WeightBlock

from .llama_layer import append_and_attend, causal_visibility

TargetAttentionFn = Callable[[Tensor, Tensor, Tensor, AttentionOptions], Tensor]
"""(queries, keys, values [B, H, T, ..] of the layer, its options) -> attention outputs [B, H, T,
..].
"""

EXPERT_SETTINGS: dict[str, Any] = {
    "num_dense_layers": 0,
    "moe_layer_start_index": 0,
    "moe_layer_interval": 1,
    "expert_layer_offset": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
"""Settings, besides `first_k_dense_replace`, with which the first layer has experts if any has."""


class TargetLayer(WeightBlock):
    """A layer like the target's last layer with full attention, with random weights, and a norm
    like its final norm.
    """

    def __init__(self, target: Target, has_experts: bool = False) -> None:
        super().__init__()
        config = single_layer_config(target.config, has_experts)
        try:
            decoder: Any = original_class(target.decoder)(config)
        except Exception as error:  # the model's code may raise any error
            raise UserError(
                f"drafter=mtp: a layer of {target.name}'s kind cannot be built "
                f"({first_line(error)}); use recipe=eagle3"
            ) from error
        num_layers = len(find_layers(decoder) or ())
        if num_layers != 1:
            raise UserError(
                f"target {target.name}: one layer of its kind cannot be built alone (its code "
                f"makes {num_layers} of one); use recipe=eagle3 without "
                "drafter.architecture.experts"
            )
        decoder.set_input_embeddings(nn.Identity())
        for name, part in target.decoder.named_children():
            if not [*part.parameters()] and name in decoder._modules:
                # The rotary embedding is shared and no submodule: casting the drafter would round
                # its frequencies.
                del decoder._modules[name]
                decoder.__dict__[name] = part
        self.decoder = decoder.float()
        self.rope_switch = target.rope_switch
        if any(weight.shape != (target.width,) for weight in self.norm.parameters()):
            raise UserError(
                f"drafter=mtp: {target.name} has further modules between embedding, layers and "
                "norm; use recipe=eagle3"
            )

    @property
    def layers_name(self) -> str:
        """The decoder's name of the list of its one layer."""
        return layer_list_name(self.decoder) or ""

    @property
    def norm_name(self) -> str:
        """The decoder's name of the final norm, its last module with parameters."""
        norms = [
            name
            for name, module in self.decoder.named_children()
            if name != self.layers_name and [*module.parameters()]
        ]
        if not norms:
            raise UserError(
                "drafter=mtp: the target's decoder has no final norm; use recipe=eagle3"
            )
        return norms[-1]

    @property
    def norm(self) -> nn.Module:
        return self.decoder.get_submodule(self.norm_name)

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        attends: TargetAttentionFn,
        cache: TreeCache | None = None,
    ) -> Tensor:
        """Return normed states [B, T, D] of inputs [B, T, D] at positions [B, T]; only `attends`
        uses the cache.
        """
        positions = positions.expand(len(inputs), -1)
        if self.rope_switch is not None:
            positions = positions.clamp(max=self.rope_switch - 1)
        # With use_cache and no cache, transformers' masks would synchronise the device.
        cache_arguments = {cache_argument(self.decoder): cache, "use_cache": cache is not None}
        output = self.decoder(
            inputs_embeds=inputs, position_ids=positions, **cache_arguments, attends=attends
        )
        states: Tensor = output.last_hidden_state
        return states


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before FSDP2 replaced it by its own, if the target is
    sharded.
    """
    bases = type(module).__mro__
    return bases[2] if bases[1].__name__ == "FSDPModule" else bases[0]


def single_layer_config(config: Any, has_experts: bool = False) -> Any:
    """Return the configuration of a decoder without vocabulary that has one layer.

    Its kind is that of the last layer, or that which the configuration names for MTP layers. With
    `has_experts` its feed-forward block is one with experts, if any layer has such a block.
    """
    layer_config = copy.deepcopy(config)
    layer_config.num_hidden_layers = 1
    layer_config.vocab_size = 1
    layer_config.pad_token_id = None
    settings = config.to_dict()
    for key, layer_types in mtp_layer_types(settings).items():
        setattr(layer_config, key.removeprefix("mtp_"), layer_types)
    # MTP layers have experts if later layers have them.
    if "first_k_dense_replace" in settings:
        layer_config.first_k_dense_replace = 0
    if has_experts:
        for key in EXPERT_SETTINGS.keys() & settings.keys():
            setattr(layer_config, key, EXPERT_SETTINGS[key])
    layer_config._attn_implementation = ATTENTION_NAME
    return layer_config


def make_cached_attention(
    cache: TreeCache, visible: Tensor | None, positions: Tensor
) -> TargetAttentionFn:
    """Make the decoding attention of one layer: it appends to the cache, and attends to committed
    tokens and to nodes.

    `visible` [B, T, M] says which nodes each token sees; None means the new tokens up to itself.
    `positions` [B, M] are those of the appended nodes.
    """

    def attends(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        size = max(q.shape[-1], v.shape[-1])
        value_size = v.shape[-1]
        options = options._replace(
            scale=q.shape[-1] ** -0.5 if options.scale is None else options.scale
        )
        # The cache needs keys as wide as values.
        q, k, v = (F.pad(part, (0, size - part.shape[-1])) for part in (q, k, v))
        if visible is None and cache.is_empty:
            cache.write(0, k, v)
            outputs = causal_attention(q, k, v, None, options)
        else:
            sees = causal_visibility(q) if visible is None else visible
            outputs = append_and_attend(q, k, v, cache, sees, 0, options, positions)
        return outputs[..., :value_size]

    return attends
