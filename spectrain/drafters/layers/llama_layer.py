"""A Llama layer of the target's width and heads: its configuration and its parts, which families
share. Shapes: B batch, T tokens, H query heads, K key-value heads, D head size, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from spectrain.errors import UserError, first_line
from spectrain.kernels.gated_unit import gated_unit
from spectrain.kernels.rotate_heads import rotate_heads
from spectrain.models.attention import causal_attention
from spectrain.models.cache_types import DEFAULT_OPTIONS, AttentionOptions
from spectrain.models.compiled_layers import attend_with_cache
from spectrain.models.fast import (
    find_merged,
    multiply_output,
    multiply_parts,
    needs_gradients,
)
from spectrain.models.kv_cache import TreeCache
from spectrain.models.limits import max_text_length
from spectrain.models.rope import RopeError, drafter_rope, fit_to_head, read_rope
from spectrain.models.target import Target
from spectrain.models.weight_block import WeightBlock

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(queries [B, H, T, D], keys and values [B, K, T, D]) -> attention outputs [B, H, T, D]."""
LAYER_KEYS = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
)


def llama_layer_settings(config: Any, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings of a Llama layer with the width, heads and rotary embedding of a model's
    (text) configuration, and with changes; raise RopeError for a rotary embedding that the layer
    cannot have."""
    heads = num_heads(config)
    changes = changes or {}
    layer = {
        "hidden_size": config.hidden_size,
        "intermediate_size": ffn_size(config),
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": head_size(config),
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
        "max_position_embeddings": max_text_length(config),
        **changes,
    }
    if "rope_parameters" in changes:
        return {**layer, "rope_parameters": fit_to_head(read_rope(layer), layer["head_dim"])}
    return {**layer, "rope_parameters": drafter_rope(config.to_dict(), layer["head_dim"])}


def num_heads(config: Any) -> int:
    """Return the number of attention heads of a model; one without attention gets heads of size
    64.
    """
    return getattr(config, "num_attention_heads", None) or max(1, config.hidden_size // 64)


def ffn_size(config: Any) -> int:
    """Return the hidden size of a model's feed-forward blocks; if it has none, or one per layer,
    four times its width.
    """
    sizes = [
        getattr(config, name, None)
        for name in ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
    ]
    return next((size for size in sizes if isinstance(size, int)), 4 * config.hidden_size)


def head_size(config: Any) -> int:
    """Return the size of an attention head; if it varies by layer, that of the configuration's
    own entry.
    """
    size = config.to_dict().get("head_dim") or config.hidden_size // num_heads(config)
    # Rotary embeddings rotate pairs, so the size must be even.
    return size + size % 2


def llama_config(target: Target, changes: dict[str, Any] | None = None) -> LlamaConfig:
    """Return the configuration of one Llama layer with the target's width, heads and rotary
    embedding, which engines expect of a drafter; raise a UserError where the changes do not fit
    the target."""
    try:
        layer = llama_layer_settings(target.config, changes)
    except RopeError as error:
        where = (
            "drafter.architecture.rope_parameters"
            if "rope_parameters" in (changes or {})
            else f"target {target.name}"
        )
        raise UserError(f"{where}: {error}") from error
    try:
        return LlamaConfig(num_hidden_layers=1, vocab_size=target.head.vocab_size, **layer)
    except StrictDataclassError as error:
        reason = first_line(error.__cause__ or error).rstrip(".")
        raise UserError(
            f"drafter.architecture: it does not fit target {target.name}: {reason}; correct it, or "
            "use the target that the drafter is for"
        ) from error


class Attention(WeightBlock):
    """Rotary attention over inputs of `in_width`, with grouped key-value heads, and with a
    window over the last positions.
    """

    weight_methods: ClassVar[tuple[str, ...]] = ("project_qkv", "project_output")

    def __init__(self, config: LlamaConfig, in_width: int, window: int | None = None) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.window = window
        self.num_heads = config.num_attention_heads
        self.q_proj = nn.Linear(in_width, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(in_width, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(in_width, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(
            config.num_attention_heads * config.head_dim, config.hidden_size, bias=False
        )

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: AttentionFn) -> Tensor:
        """Return outputs [B, T, W] for inputs [B, T, ..]; `attend` mixes values by rotated queries
        and keys.
        """
        merged = find_merged(self)
        if merged is None:
            return self._join_heads(attend(*self._rotate_qkv(x, rope)))
        products = multiply_parts(x, merged, self.input_linears)
        return self._join_heads(attend(*self._rotate_products(products, rope)))

    @property
    def input_linears(self) -> list[nn.Linear]:
        """Return the linears that read the inputs."""
        return [self.q_proj, self.k_proj, self.v_proj]

    @property
    def merges_products(self) -> bool:
        """Tell whether a training may compute queries, keys and values as one product."""
        return type(self)._rotate_qkv is Attention._rotate_qkv

    @property
    def key_value_linears(self) -> list[nn.Linear]:
        """The linears that project a context to keys and values."""
        return [self.k_proj, self.v_proj]

    @torch.no_grad()
    def init_self(self, strength: float = 1.2) -> None:
        """Initialise half of the query heads of every key head as that key head, so that positions
        attend to themselves.

        A drafter learns the token of a position only through attention, and heads that start at
        random give it one part in T. Over normed inputs the scaled product of a query and its own
        key is about strength^2 * sqrt(head_dim); other products deviate from 0 by strength^2. The
        other query heads stay random.
        """
        nn.init.normal_(self.k_proj.weight, std=strength / self.k_proj.in_features**0.5)
        queries, keys = (
            linear.weight.unflatten(0, (-1, self.head_dim)) for linear in (self.q_proj, self.k_proj)
        )
        shared = len(queries) // len(keys)
        queries.unflatten(0, (-1, shared))[:, : (shared + 1) // 2] = keys[:, None]

    def project_qkv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries [B, H, T, D], rotated keys [B, K, T, D] and values [B, K, T,
        D].
        """
        return self._rotate_qkv(x, rope)

    def _rotate_qkv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return self._rotate_products([linear(x) for linear in self.input_linears], rope)

    def _rotate_products(
        self, products: Sequence[Tensor], rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated heads of the products [B, T, H D] and [B, T, K D] of queries, keys and
        values.
        """
        if needs_gradients(products[0]) and rope[0].shape[-1] == self.head_dim:
            return rotate_heads(products[0], products[1], products[2], *rope)
        q, k, v = (
            product.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for product in products
        )
        q, k = apply_rotary_pos_emb(q, k, *rope)
        # Under autocast, the rotary product has a wider type.
        return q.to(v.dtype), k.to(v.dtype), v

    def project_output(self, attended: Tensor) -> Tensor:
        """Project attention outputs [B, H, T, D] to [B, T, W]."""
        return self._join_heads(attended)

    def _join_heads(self, attended: Tensor) -> Tensor:
        return multiply_output(attended.transpose(1, 2).flatten(2), self.o_proj)

    def attend_causal(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...] | None = None
    ) -> Tensor:
        """Compute training attention: causal, and inside each packed document of these lengths."""
        return self.project_output(
            causal_attention(q, k, v, lengths, AttentionOptions(window=self.window))
        )

    def attend_cached(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: TreeCache,
        visible: Tensor | None,
        layer: int = 0,
    ) -> Tensor:
        """Compute decoding attention: append to the cache, and attend to its committed tokens and
        to nodes.

        `visible` [B, T, M] says which nodes each token sees; None means the new tokens up to
        itself. With a window, the caller sets the new nodes' positions on the cache first
        (`set_positions`).
        """
        if visible is None and cache.is_empty:
            cache.write(layer, k, v)
            return self.attend_causal(q, k, v)
        if visible is None:
            visible = causal_visibility(q)
        return self.project_output(
            append_and_attend(
                q,
                k,
                v,
                cache,
                visible,
                layer,
                AttentionOptions(window=self.window),
                cache.positions,
            )
        )


def causal_visibility(q: Tensor) -> Tensor:
    """Return [B, T, T] bool, which lets each of the new tokens of queries [B, H, T, D] see those up
    to itself.
    """
    batch, _, length, _ = q.shape
    ones = torch.ones(length, length, dtype=torch.bool, device=q.device)
    return ones.tril().expand(batch, -1, -1)


def append_and_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: TreeCache,
    visible: Tensor,
    layer: int,
    options: AttentionOptions = DEFAULT_OPTIONS,
    positions: Tensor | None = None,
) -> Tensor:
    """Append nodes to a drafter's cache, and attend from the last N ones to it: [B, H, N, D].
    May be compiled.
    """
    if torch.compiler.is_compiling():
        return attend_with_cache(q, k, v, visible, cache, layer, options, positions).transpose(1, 2)
    return cache.attend_new(layer, q, k, v, visible, options, positions)


class NormedAttention(Attention):
    """Qwen3's attention: queries and keys are normed per head before the rotation. It may also
    attend to a context.
    """

    weight_methods = (*Attention.weight_methods, "project_kv")

    def __init__(self, config: LlamaConfig, in_width: int, window: int | None = None) -> None:
        super().__init__(config, in_width, window)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def _rotate_qkv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        k, v = self._rotate_kv(x, rope)
        return apply_rotary(q, rope).to(v.dtype), k, v

    def project_kv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values [B, K, T, D] of a context [B, T, W]."""
        return self._rotate_kv(x, rope)

    def _rotate_kv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return apply_rotary(k, rope).to(v.dtype), v


def apply_rotary(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate queries or keys [B, H, T, D] by their positions."""
    cos, sin = (part[:, None] for part in rope)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Mlp(WeightBlock):
    """Llama's gated feed-forward block."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        merged = find_merged(self)
        if merged is None:
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = multiply_parts(x, merged, self.input_linears)
        unit = gated_unit(gate, up) if needs_gradients(gate) else F.silu(gate) * up
        return multiply_output(unit, self.down_proj)

    @property
    def input_linears(self) -> list[nn.Linear]:
        """Return the linears that read the inputs."""
        return [self.gate_proj, self.up_proj]

    @property
    def merges_products(self) -> bool:
        """Tell whether a training may compute gate and up as one product."""
        return type(self).forward is Mlp.forward


RotaryFn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(a tensor, for its type; positions [B, T]) -> cosines and sines [B, T, D]."""


class Rotary:
    """The rotary embedding of a configuration.

    It is no submodule of the drafter, because casting that to bfloat16 would round its frequencies.
    So it moves to the drafter's device by itself, once: a copy from the CPU in every forward would
    synchronise the GPU, which a CUDA graph does not allow.
    """

    def __init__(self, config: LlamaConfig) -> None:
        self.module = LlamaRotaryEmbedding(config)
        self.table: Tensor | None = None

    def __call__(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [B, T, D] of positions [B, T], in the type of `x`."""
        if self.module.inv_freq.device != x.device:
            self.module.to(x.device)
        return self.module(x, positions)

    def tabulate(self, x: Tensor, length: int) -> Tensor:
        """Return [T, 2, D / 2] cosines and sines of at least `length` positions, in the type and on
        the device of `x`. They are made once, in a round that nothing captures or compiles.
        """
        table = self.table
        is_current = table is not None and table.device == x.device and table.dtype == x.dtype
        if table is None or not is_current or len(table) < length:
            assert not torch.compiler.is_compiling()
            parts = self(x, torch.arange(length, device=x.device)[None])
            half = parts[0].shape[-1] // 2
            table = torch.stack([part[0, :, :half] for part in parts], dim=1).contiguous()
            self.table = table
        return table


@torch.no_grad()
def init_from_target(fc: nn.Linear, norm: nn.RMSNorm, target: Target) -> None:
    """Initialise `fc` to pass on the last of the fused layers, and `norm` as the target's final
    norm.
    """
    fc.weight.zero_()
    fc.weight[:, -target.width :].fill_diagonal_(1.0)
    scale = final_norm_scale(target)
    if scale is not None:
        norm.weight.copy_(scale)


@torch.no_grad()
def final_norm_scale(target: Target) -> Tensor | None:
    """Measure the scale [W] of the target's final norm, in whatever form it is stored; None if
    it is no RMS norm.
    """
    ones = torch.ones(1, 1, target.width, device=target.device, dtype=target.dtype)
    positive, negative = (target.apply_final_norm(sign * ones)[0, 0].float() for sign in (1, -1))
    if not torch.allclose(positive, -negative) or not positive.any():
        return None
    return positive * (1 + getattr(target.config, "rms_norm_eps", 1e-6)) ** 0.5
