"""DFlare and DFly (AngelSpec, 2026; DFly: arXiv 2607.25852): block drafters each of whose layers
reads its own mixture of the target's layers.

Shapes: F fused layers of the target, W width, K key-value heads, D head size, T positions of the
context.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.drafters.dflash import DFlash, DFlashConfig
from spectrain.drafters.dspark import DSpark, DSparkConfig
from spectrain.drafters.layers.block_drafter import BlockConfig, BlockDrafter
from spectrain.drafters.layers.llama_layer import NormedAttention, apply_rotary, llama_config
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.models.weight_block import BlockLinear


class MixedAttention(NormedAttention):
    """Attention whose context is a mixture of the target's layers, with learned weights that sum
    to 1.

    The context holds the states of all fused layers, [.., F W]; with `has_shared`, a context that
    all layers of the drafter share comes before them, [.., (1 + F) W], and the mixture is added to
    it. With `has_projections` the context has keys and values by linears of its own.
    """

    def __init__(
        self, config: Any, num_fused: int, has_shared: bool, has_projections: bool
    ) -> None:
        super().__init__(config, config.hidden_size)
        self.has_shared = has_shared
        self.mixture = nn.Parameter(torch.zeros(num_fused))  # logits of the weights
        self.context_k_proj: nn.Linear | None = None
        self.context_v_proj: nn.Linear | None = None
        if has_projections:
            size = self.k_proj.out_features
            self.context_k_proj = nn.Linear(config.hidden_size, size, bias=False)
            self.context_v_proj = nn.Linear(config.hidden_size, size, bias=False)

    @property
    def key_value_linears(self) -> list[nn.Linear]:
        if self.context_k_proj is None or self.context_v_proj is None:
            return super().key_value_linears
        return [self.context_k_proj, self.context_v_proj]

    def mix_layers(self, context: Tensor) -> Tensor:
        """Return the mixture [.., W] of a context's layers, added to the shared context where
        there is one.
        """
        parts = context.unflatten(-1, (-1, self.q_proj.in_features))
        weights = self.mixture.softmax(0).to(parts.dtype)
        mixed = torch.einsum("f,...fw->...w", weights, parts[..., -len(weights) :, :])
        return parts[..., 0, :] + mixed if self.has_shared else mixed

    def project_kv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values [B, K, T, D] of a context [B, T, ..]."""
        mixed = self.mix_layers(x)
        keys, values = (
            linear(mixed).unflatten(-1, (-1, self.head_dim)) for linear in self.key_value_linears
        )
        return apply_rotary(self.k_norm(keys).transpose(1, 2), rope).to(
            values.dtype
        ), values.transpose(1, 2)


def mix_context(
    drafter: BlockDrafter,
    target: Target,
    config: BlockConfig,
    has_shared: bool,
    has_projections: bool,
) -> None:
    """Give every layer of a block drafter an attention that mixes the target's layers."""
    architecture = config.architecture or {}
    for key in ("latent_attention", "experts"):
        if architecture.get(key):
            raise UserError(
                f"drafter.architecture.{key}=true: layers that mix the target's layers have "
                "ordinary heads and feed-forward blocks; leave it out"
            )
    layer_config = llama_config(target, architecture)
    for block in drafter.blocks:
        block.self_attn = MixedAttention(
            layer_config, len(drafter.fused_layers), has_shared, has_projections
        )


@dataclass(frozen=True, kw_only=True)
class DFlareConfig(DFlashConfig):
    """Settings of DFlare."""

    # Whether keys and values of the context have linears of their own, beside those of the block.
    context_projections: bool = True


class DFlare(DFlash):
    """DFlash whose layer j attends to the context c_j = sum_i a_ji norm(fc(h_i)) over the target's
    fused layers h_i, with weights a_j = softmax(w_j) of its own.

    One `fc` [W, W] and one norm serve all fused layers. At first all layers weigh the same. With
    all weight on one layer and no projections of the context, this is DFlash that fuses that layer.
    """

    saved = replace(DFlash.saved, shape=(*DFlash.saved.shape, "context_projections"))

    def __init__(self, target: Target, config: DFlareConfig) -> None:
        super().__init__(target, config)
        mix_context(self, target, config, False, config.context_projections)
        self.fc = BlockLinear(target.width, target.width, bias=False)

    def project_fused(self, fused: Tensor) -> Tensor:
        """Project concatenated layers [.., F W] one by one to the context [.., F W]."""
        layers = fused.to(self.fc.weight.dtype).unflatten(-1, (len(self.fused_layers), -1))
        return self.hidden_norm(self.fc(layers)).flatten(-2)


class DFly(DSpark):
    """DSpark whose layer j attends to the context c + s * sum_i a_ji h_i / |h_i|: the shared one c
    of all layers, and a mixture of the target's fused layers h_i with weights a_j = softmax(w_j) of
    its own as a residual.

    |h| is the root mean square. The scale s [W] is 0 at first, so that training starts from
    DSpark.
    """

    def __init__(self, target: Target, config: DSparkConfig) -> None:
        super().__init__(target, config)
        mix_context(self, target, config, True, False)
        self.mixture_norm = nn.RMSNorm(target.width, eps=self.hidden_norm.eps)
        nn.init.zeros_(self.mixture_norm.weight)

    def project_fused(self, fused: Tensor) -> Tensor:
        """Return the shared context and the normed layers, [.., (1 + F) W]."""
        shared = super().project_fused(fused)
        layers = fused.to(shared.dtype).unflatten(-1, (len(self.fused_layers), -1))
        return torch.cat([shared, self.mixture_norm(layers).flatten(-2)], dim=-1)
