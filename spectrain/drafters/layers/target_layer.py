"""One decoder layer of a target's own kind, with the final norm behind it. Shapes: B batch, T tokens, D width, H heads.

Whatever the architecture: latent attention, experts, norms that scale by 1 + w. It is the target's decoder class with one
layer and no embedding, so that rotary embedding and norms are what they are in the target; what a token sees, the drafter says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.errors import UserError, first_line
from spectrain.models.attention import ATTENTION_NAME, causal_attention
from spectrain.models.decoder import layer_list_name
from spectrain.models.kv_cache import AttentionOptions, TreeCache
from spectrain.models.mtp_files import mtp_layer_types

from .layers import append_and_attend

if TYPE_CHECKING:
    from spectrain.models.target import Target

TargetAttentionFn = Callable[[Tensor, Tensor, Tensor, AttentionOptions], Tensor]
"""(queries, keys, values [B, H, T, ..] of the layer, its rules) -> what it attends to, [B, H, T, ..]."""


class TargetLayer(nn.Module):
    """A layer like the target's last one that attends over all the text, with random weights, and a norm like its final one."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        config = one_layer_config(target.config)
        try:
            decoder: Any = original_class(target.decoder)(config)
        except Exception as error:  # of any kind: the model's code is transformers' or a stranger's
            raise UserError(
                f"drafter=mtp: a layer of {target.name}'s own kind cannot be made ({first_line(error)}); use recipe=eagle3"
            ) from error
        decoder.set_input_embeddings(nn.Identity())
        for name, part in target.decoder.named_children():
            if not [*part.parameters()] and name in decoder._modules:
                # The rotary embedding stays the target's and no child: casting a drafter would round its frequencies.
                del decoder._modules[name]
                decoder.__dict__[name] = part
        self.decoder = decoder.float()
        self.rope_switch = target.rope_switch
        if any(weight.shape != (target.width,) for weight in self.norm.parameters()):
            raise UserError(
                f"drafter=mtp: {target.name} has parts of its own between embedding, layers and norm; use recipe=eagle3"
            )

    @property
    def layers_name(self) -> str:
        """What the decoder calls the list of its one layer."""
        return layer_list_name(self.decoder) or ""

    @property
    def norm_name(self) -> str:
        """Of the final norm: what has parameters behind the layers."""
        found = [name for name, part in self.decoder.named_children() if name != self.layers_name and [*part.parameters()]]
        if not found:
            raise UserError("drafter=mtp: the target's decoder ends without a norm of its own; use recipe=eagle3")
        return found[-1]

    @property
    def norm(self) -> nn.Module:
        return self.decoder.get_submodule(self.norm_name)

    def forward(self, inputs: Tensor, positions: Tensor, attends: TargetAttentionFn, cache: TreeCache | None = None) -> Tensor:
        """Normed states [B, T, D] of inputs [B, T, D] at positions [B, T]; of a cache only `attends` makes use."""
        positions = positions.expand(len(inputs), -1)
        if self.rope_switch is not None:
            positions = positions.clamp(max=self.rope_switch - 1)
        told = {"past_key_values": cache, "use_cache": cache is not None}  # without one, masks would ask the device
        output = self.decoder(inputs_embeds=inputs, position_ids=positions, **told, attends=attends)
        states: Tensor = output.last_hidden_state
        return states


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, which FSDP2 replaces by one of its own where a target is spread out."""
    kinds = type(module).__mro__
    return kinds[2] if kinds[1].__name__ == "FSDPModule" else kinds[0]


def one_layer_config(config: Any) -> Any:
    """The configuration of a decoder with one layer of the last one's kind, or of what it says of its MTP layers, and a
    vocabulary of nothing."""
    one = copy.deepcopy(config)
    one.num_hidden_layers, one.vocab_size, one.pad_token_id = 1, 1, None
    said = config.to_dict()
    for key, kinds in mtp_layer_types(said).items():
        setattr(one, key.removeprefix("mtp_"), kinds)
    if "first_k_dense_replace" in said:  # MTP layers have experts where later layers do
        one.first_k_dense_replace = 0
    one._attn_implementation = ATTENTION_NAME
    return one


def make_cached_attention(cache: TreeCache, visible: Tensor | None, positions: Tensor) -> TargetAttentionFn:
    """Attention in decoding over one layer: append to the cache, see its committed tokens and the nodes in `visible` [B, T, M],
    or without it, in an empty cache, the new tokens up to the own one. `positions` [B, M] are those of the appended nodes."""

    def attends(q: Tensor, k: Tensor, v: Tensor, rules: AttentionOptions) -> Tensor:
        size, value_size = max(q.shape[-1], v.shape[-1]), v.shape[-1]
        rules = rules._replace(scale=q.shape[-1] ** -0.5 if rules.scale is None else rules.scale)
        q, k, v = (F.pad(part, (0, size - part.shape[-1])) for part in (q, k, v))  # a cache holds keys as wide as values
        if visible is None:
            cache.append(0, k, v)
            found = causal_attention(q, k, v, None, *rules)
        else:
            found = append_and_attend(q, k, v, cache, visible, 0, rules, positions)
        return found[..., :value_size]

    return attends
