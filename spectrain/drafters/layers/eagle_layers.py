"""The layers of EAGLE-3, which families share: fused features of the target beside the embedding of the token after them.

Shapes: B batch, T tokens, D target width, V draft vocabulary, P fresh positions, F nodes.
Index t pairs the target's features at t with the embedding of token t + 1, and predicts token t + 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from spectrain.drafters.abilities import Capture
from spectrain.drafters.base import Stage
from spectrain.errors import UserError
from spectrain.models.features import Features, Layer
from spectrain.models.kv_cache import TreeCache
from spectrain.models.packed_linears import FeatureLinear

from . import fused_cpu_eagle as lean_eagle
from .layers import Attention, Mlp, NormedAttention, init_from_target, llama_config, make_rotary
from .output_layer import init_output_layer, make_output_layer, project_down
from .vocabulary import VocabularyDrafter

if TYPE_CHECKING:
    from spectrain.models.target import Target

LAYER_KEYS = (
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters",
    "max_position_embeddings",
)  # fmt: skip
NORM_VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "qk_norm")
EagleAttentionFn = Callable[[int, Attention, Tensor], Tensor]
"""(number of the layer, its attention, what that reads [B, T, ..]) -> what attention gives [B, T, D]."""


def default_layers(num_layers: int) -> list[int]:
    """The layers that engines fuse where nothing is said: the residual stream entering these."""
    return sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)})


def check_architecture(architecture: dict[str, Any], variants: tuple[str, ...]) -> dict[str, Any]:
    """The architecture with every variant said; refuses unknown keys and norms that exclude each other."""
    for key in architecture:
        if key not in (*LAYER_KEYS, *variants):
            raise UserError(
                f"drafter.architecture.{key}: there is no such key; valid are {', '.join((*LAYER_KEYS, *variants))}"
            )
    whole = {**dict.fromkeys(variants, False), **architecture}
    if whole.get("norm_before_fc") and whole.get("fc_norm"):
        raise UserError("drafter.architecture.fc_norm: norm_before_fc norms the fused features already; use one of them")
    return whole


@dataclass(frozen=True)
class EagleSettings:
    """What every drafter with these layers is asked for; Eagle3 says what each means."""

    num_layers: int
    layers: list[int] | None
    vocab_size: int
    window: int | None
    start: str
    own_embedding: bool
    head_rank: int | None
    architecture: dict[str, Any]  # with every variant said


class LaterLayer(nn.Module):
    """A decoder layer behind the first: it reads the residual stream alone."""

    def __init__(self, config: LlamaConfig, attention: type[Attention], window: int | None) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = attention(config, config.hidden_size, window)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, number: int, attend: EagleAttentionFn) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        x = x + attend(number, self.self_attn, self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleDrafter(VocabularyDrafter):
    """A first layer that reads embedding and hidden state side by side, and Llama layers behind it (`later`).

    The first layer's parts are the drafter's own, so that one layer has the names that drafters were always saved under.
    """

    abilities = replace(VocabularyDrafter.abilities, capture=Capture(carried=("cache",)))
    norm_output = False  # whether the normed output is what the next draft step reads

    def __init__(self, target: Target, settings: EagleSettings) -> None:
        super().__init__()
        asked = settings.architecture
        config = llama_config(target, {key: value for key, value in asked.items() if key in LAYER_KEYS})
        chosen = default_layers(target.num_layers) if settings.layers is None else sorted(set(settings.layers))
        if not chosen:
            raise UserError("drafter.layers=[]: name at least one layer, or leave it out")
        target.check_layers(chosen)
        self.fused_layers: tuple[Layer, ...] = tuple(chosen)
        self.layers = (*self.fused_layers, "final")
        self.window, self.start, self.head = settings.window, settings.start, target.head
        self.norm_before_residual = asked["norm_before_residual"]
        rows, width, attention = target.head.vocab_size, target.width, NormedAttention if asked["qk_norm"] else Attention
        vocab_size = min(settings.vocab_size, rows)

        def norm(size: int = width) -> nn.RMSNorm:
            return nn.RMSNorm(size, eps=config.rms_norm_eps)

        self.input_norm = norm(len(self.fused_layers) * width) if asked["norm_before_fc"] else None
        self.fc_norm = nn.ModuleList(norm() for _ in self.fused_layers) if asked["fc_norm"] else None
        self.embed_tokens = nn.Embedding(rows, width) if settings.own_embedding else None
        self.fc = FeatureLinear(len(self.fused_layers) * width, width, bias=False)
        self.input_layernorm, self.hidden_norm = norm(), norm()
        self.self_attn = attention(config, 2 * width, settings.window)
        self.post_attention_layernorm, self.mlp, self.norm = norm(), Mlp(config), norm()
        self.later = nn.ModuleList(LaterLayer(config, attention, settings.window) for _ in range(settings.num_layers - 1))
        self.lm_down, self.lm_head = make_output_layer(width, vocab_size, settings.head_rank)
        self.rotary = make_rotary(config)
        self.add_vocabulary(vocab_size, rows)
        self.cache: TreeCache | None = None

    @property
    def num_layers(self) -> int:
        return 1 + len(self.later)

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Choose the draft vocabulary and, unless `start` is random, start from the target's own head and features.

        The head and its norm are the target's, and fc passes the last fused layer on, so the first logits are near the
        target's own. The layers start at random: copied from the target's last layer one learns slower (measured on
        SmolLM2, 46k tokens: agreement 0.24 against 0.30), for that layer predicts the token that is already known.
        """
        ids = self.choose_vocabulary(token_counts)
        if self.embed_tokens is not None:
            with torch.no_grad():
                self.embed_tokens.weight.copy_(self.head.all_embeddings(target.device))
        if self.start == "random":
            return
        init_output_layer(self.lm_down, self.lm_head, self.head.output.weight[ids])
        init_from_target(self.fc, self.norm, target)

    @property
    def stages(self) -> list[Stage]:
        return [Stage.whole(self, self.layers, final_reach=0)]

    def fuse_features(self, features: Features) -> Tensor:
        """The first hidden state [B, T, D]: the fused layers of the target through fc."""
        return self.project_fused(features.fuse_layers(self.fused_layers))

    def project_fused(self, fused: Tensor) -> Tensor:
        """[B, T, fused layers * D] -> [B, T, D]"""
        fused = fused.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            fused = self.input_norm(fused)
        if self.fc_norm is not None:
            parts = fused.chunk(len(self.fc_norm), dim=-1)
            fused = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        return self.fc(fused)

    def embed_inputs(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, D], by the target's embedding, which is not trained, or the drafter's own."""
        if self.embed_tokens is not None:
            return self.embed_tokens(tokens).to(self.fc.weight.dtype)
        with torch.no_grad():
            return self.head.embed(tokens).to(self.fc.weight.dtype)

    def attention_inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the first attention reads [B, T, 2 D], and the residual stream [B, T, D]."""
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(self.embed_inputs(tokens)), normed], dim=-1)
        return x, normed if self.norm_before_residual else hidden

    def run_later_layers(self, hidden: Tensor, attend: EagleAttentionFn) -> Tensor:
        """The state [B, T, D] that the next draft step reads, from the residual stream behind the first attention."""
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        for number, layer in enumerate(self.later, 1):
            hidden = layer(hidden, number, attend)
        return self.norm(hidden) if self.norm_output else hidden

    def run_layers(self, tokens: Tensor, hidden: Tensor, attend: EagleAttentionFn) -> Tensor:
        """The state [B, T, D] behind all layers."""
        x, residual = self.attention_inputs(tokens, hidden)
        return self.run_later_layers(residual + attend(0, self.self_attn, x), attend)

    def head_inputs(self, hidden: Tensor) -> Tensor:
        return project_down(self.lm_down, hidden if self.norm_output else self.norm(hidden))

    def run(self, tokens: Tensor, hidden: Tensor, positions: Tensor, cache: TreeCache, visible: Tensor | None) -> Tensor:
        """The output state [B, F, D] of new nodes, appended to the cache behind what it holds."""
        if lean_eagle.uses_fused_cpu(self):
            return lean_eagle.run_layer(self, tokens, hidden, positions, cache, visible)
        rope = self.rotary(self.fc.weight.detach(), positions)
        if self.window is not None:
            cache.set_positions(positions)

        def attend(number: int, attention: Attention, x: Tensor) -> Tensor:
            return attention.attend_cached(*attention.project_qkv(x, rope), cache, visible, number)

        output = self.run_layers(tokens, hidden, attend)
        cache.add_uncommitted(tokens.shape[1])
        return output

    def log_q(self, hidden: Tensor) -> Tensor:
        """[B, F, D] -> [B, F, V]"""
        if lean_eagle.uses_fused_cpu(self):
            return lean_eagle.log_q(self, hidden)
        return self.lm_head(self.head_inputs(hidden)).float().log_softmax(-1)
