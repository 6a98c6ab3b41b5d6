"""Parts of a drafter's layer that are of the target's own kind: multi-head latent attention and
experts.

Shapes: B batch, T tokens, H heads, D size of a head's queries and keys, E of its values, W width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.models.weight_block import WeightBlock

from .llama_layer import LAYER_KEYS, Attention, apply_rotary
from .target_layer import TargetLayer

KIND_VARIANTS = ("latent_attention", "experts")
"""Keys of an architecture that name parts of the target's kind in place of Llama's."""
LATENT_KEYS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
"""The sizes of latent attention, as configurations name them; q_lora_rank may be null."""


class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1) over inputs of `in_width`.

    Keys and values of all heads come from one vector of `kv_lora_rank` values, and all heads share
    the part of the key that is rotated. Names of tensors are those of DeepSeek's models. Queries,
    keys and values are padded to one size, which a cache needs, and queries make up for it.
    """

    weight_methods = (*Attention.weight_methods, "project_kv")

    def __init__(self, config: LlamaConfig, in_width: int, window: int | None = None) -> None:
        nn.Module.__init__(self)
        settings: Any = config
        self.window, self.num_heads = window, settings.num_attention_heads
        self.rank, self.value_size = settings.kv_lora_rank, settings.v_head_dim
        self.plain_size = settings.qk_nope_head_dim
        self.rotary_size = settings.qk_rope_head_dim
        key_size = self.plain_size + self.rotary_size
        self.head_dim = max(key_size, self.value_size)
        # Attention divides the scores by the root of the padded size.
        self.query_factor = (self.head_dim / key_size) ** 0.5
        self.query_factor *= latent_scale(settings.rope_parameters)
        query_width = self.num_heads * key_size
        self.query_rank: int | None = settings.q_lora_rank
        if self.query_rank is None:
            self.q_proj = nn.Linear(in_width, query_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(in_width, self.query_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(self.query_rank, eps=config.rms_norm_eps)
            self.q_b_proj = nn.Linear(self.query_rank, query_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(in_width, self.rank + self.rotary_size, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(self.rank, eps=config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(
            self.rank, self.num_heads * (self.plain_size + self.value_size), bias=False
        )
        self.o_proj = nn.Linear(self.num_heads * self.value_size, config.hidden_size, bias=False)

    @property
    def input_linears(self) -> list[nn.Linear]:
        first = self.q_proj if self.query_rank is None else self.q_a_proj
        return [first, self.kv_a_proj_with_mqa]

    @property
    def key_value_linears(self) -> list[nn.Linear]:
        return [self.kv_a_proj_with_mqa, self.kv_b_proj]

    def init_self(self, strength: float = 1.2) -> None:
        """Leave the weights random: no linear gives the keys alone."""

    def _rotate_qkv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys [B, H, T, D] and values, each padded with zeros."""
        q = self._split_heads(self._project_queries(x))
        plain, rotated = q.split([self.plain_size, self.rotary_size], dim=-1)
        k, v = self._rotate_kv(x, rope)
        q = torch.cat([plain, apply_rotary(join_pairs(rotated), rope).to(plain.dtype)], dim=-1)
        return self._pad(q * self.query_factor).to(v.dtype), k, v

    def project_kv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values [B, H, T, D] of inputs [B, T, W], padded with zeros."""
        return self._rotate_kv(x, rope)

    def _rotate_kv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.rank, self.rotary_size], dim=-1)
        parts = self._split_heads(self.kv_b_proj(self.kv_a_layernorm(latent)))
        plain, v = parts.split([self.plain_size, self.value_size], dim=-1)
        rotated = apply_rotary(join_pairs(shared[:, None]), rope).to(plain.dtype)
        k = torch.cat([plain, rotated.expand(-1, self.num_heads, -1, -1)], dim=-1)
        return self._pad(k).to(v.dtype), self._pad(v)

    def _join_heads(self, attended: Tensor) -> Tensor:
        return super()._join_heads(attended[..., : self.value_size])

    def _project_queries(self, x: Tensor) -> Tensor:
        if self.query_rank is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _pad(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, self.head_dim - x.shape[-1]))


def join_pairs(x: Tensor) -> Tensor:
    """Return vectors [.., D] whose pairs (2 i, 2 i + 1) stand at i and i + D / 2, where the
    rotation reads them.
    """
    return torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)


def latent_scale(rope: dict[str, Any]) -> float:
    """Return the factor of DeepSeek's yarn for the scores: (0.1 mscale_all_dim ln(factor) + 1)^2;
    1 for other rotary embeddings.
    """
    factor = rope.get("factor") or 1.0
    strength = rope.get("mscale_all_dim") or 0.0
    if rope.get("rope_type") != "yarn" or factor <= 1:
        return 1.0
    return float((0.1 * strength * math.log(factor) + 1) ** 2)


def check_architecture(architecture: dict[str, Any], variants: tuple[str, ...]) -> dict[str, Any]:
    """Return the architecture with all variants; refuse unknown keys, and norms that exclude
    each other.
    """
    sizes = LATENT_KEYS if "latent_attention" in variants else ()
    keys = (*LAYER_KEYS, *variants, *sizes)
    for key in architecture:
        if key not in keys:
            raise UserError(
                f"drafter.architecture.{key}: there is no such key; use one of {', '.join(keys)}"
            )
    complete = {**dict.fromkeys(variants, False), **architecture}
    if complete.get("norm_before_fc") and complete.get("fc_norm"):
        raise UserError(
            "drafter.architecture.fc_norm: norm_before_fc already norms the fused features; use "
            "one of them"
        )
    check_latent_keys(complete)
    return complete


def check_latent_keys(architecture: dict[str, Any]) -> None:
    """Raise UserError for a size of latent attention, or a norm of heads, that a layer does not
    have.
    """
    sizes = [key for key in LATENT_KEYS if key in architecture]
    if sizes and not is_latent(architecture):
        raise UserError(
            f"drafter.architecture.{sizes[0]}: it is a size of latent attention; add "
            "drafter.architecture.latent_attention=true"
        )
    if is_latent(architecture) and architecture.get("qk_norm"):
        raise UserError(
            "drafter.architecture.qk_norm: latent attention norms its latent vectors; use one of "
            "them"
        )


def layer_changes(target: Target, architecture: dict[str, Any]) -> dict[str, Any]:
    """Return what an architecture changes of a Llama layer's configuration; with latent attention
    its sizes too.
    """
    changes = {key: value for key, value in architecture.items() if key in LAYER_KEYS}
    return changes | (
        latent_sizes(target.config, architecture, target.name) if is_latent(architecture) else {}
    )


def is_latent(architecture: dict[str, Any]) -> bool:
    """Tell whether an architecture has latent attention."""
    return bool(architecture.get("latent_attention"))


def latent_sizes(config: Any, architecture: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the settings of a latent layer: the sizes of a target's configuration, with changes,
    and the size of the rotated part as that of a head, which the rotary embedding reads.

    A UserError says that the target of this name has no latent attention, and which size is not
    named.
    """
    sizes = {key: architecture.get(key, getattr(config, key, None)) for key in LATENT_KEYS}
    missing = [key for key, size in sizes.items() if size is None and key != "q_lora_rank"]
    if missing:
        raise UserError(
            f"drafter.architecture.latent_attention=true: target {name} has no latent attention; "
            f"leave it out, or name its sizes ({', '.join(missing)})"
        )
    return {**sizes, "head_dim": sizes["qk_rope_head_dim"]}


def make_experts(target: Target) -> nn.Module:
    """Return a feed-forward block with experts, of the class and sizes that the target's later
    layers have, with random weights.
    """
    layer = TargetLayer(target, has_experts=True)
    (decoder_layer,) = getattr(layer.decoder, layer.layers_name)
    for name, part in decoder_layer.named_children():
        # Some attention has experts of its own.
        if "att" not in name and any("expert" in inner for inner, _ in part.named_modules()):
            block: nn.Module = part
            return block
    raise UserError(
        f"drafter.architecture.experts=true: the layers of target {target.name} have no experts; "
        "leave it out"
    )


class ExpertBlock(WeightBlock):
    """A feed-forward block of the target's kind, which returns states alone."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.block = make_experts(target)

    def forward(self, x: Tensor) -> Tensor:
        """Transform states [B, T, W]."""
        output = self.block(x)
        states: Tensor = output[0] if isinstance(output, tuple) else output
        # Llama 4's block returns a row for each token.
        return states.reshape(x.shape)
