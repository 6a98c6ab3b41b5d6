"""The layers of EAGLE-3, which several families share. They read fused target features and the
embedding of the next token.

Shapes: B batch, T tokens, D target width, V draft vocabulary, P new positions, F nodes.
Index t pairs the target's features at t with the embedding of token t + 1, and predicts token t +
2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from spectrain.models.accelerator import accelerator
from spectrain.models.fast import FeatureLinear, join_norms, norm_stream
from spectrain.models.kv_cache import TreeCache
from spectrain.models.rope import depends_on_length
from spectrain.models.target import Target
from spectrain.models.weight_block import WeightBlock

from .fused_input import FusedDrafter, copy_embedding, make_embedding
from .llama_layer import (
    Attention,
    Mlp,
    NormedAttention,
    Rotary,
    RotaryFn,
    init_from_target,
    llama_config,
)
from .output_layer import init_output_layer, make_output_layer, project_down
from .target_kind import (
    ExpertBlock,
    LatentAttention,
    is_latent,
    layer_changes,
)

NORM_VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "qk_norm")
EagleAttentionFn = Callable[[int, Attention, Tensor], Tensor]
"""(index of the layer, its attention, its inputs [B, T, ..]) -> the outputs of attention [B, T,
D].
"""


def engine_layers(num_layers: int) -> list[int] | None:
    """Return the layers that engines fuse where config.json names none: the residual streams that
    enter these. None for a target of so few layers that these are not three different ones."""
    layers = sorted({2, num_layers // 2, num_layers - 3})
    return layers if len(layers) == 3 and layers[0] >= 0 else None


def default_layers(num_layers: int) -> list[int]:
    """Return the layers that a drafter fuses by default: the engines' default, or up to three
    different ones.
    """
    layers = sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)})
    # With 4 to 6 layers, some of the engines' coincide; the next ones take their places.
    while len(layers) < 3 and layers[-1] < num_layers - 1:
        layers.append(layers[-1] + 1)
    return layers


@dataclass(frozen=True)
class EagleSettings:
    """Settings of every drafter with these layers; Eagle3 describes each."""

    num_layers: int
    layers: list[int] | None
    vocab_size: int
    window: int | None
    start: str
    own_embedding: bool
    head_rank: int | None
    architecture: dict[str, Any]  # with all variants


class LaterLayer(WeightBlock):
    """A decoder layer after the first one, which reads only the residual stream."""

    def __init__(
        self,
        config: LlamaConfig,
        attention: type[Attention],
        window: int | None,
        make_mlp: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = attention(config, config.hidden_size, window)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = make_mlp()

    def forward(self, x: Tensor, number: int, attend: EagleAttentionFn) -> Tensor:
        """Transform the residual stream [B, T, D]."""
        normed, x = norm_stream(x, self.input_layernorm)
        x = x + attend(number, self.self_attn, normed)
        normed, x = norm_stream(x, self.post_attention_layernorm)
        return x + self.mlp(normed)


class EagleDrafter(FusedDrafter):
    """A first layer that reads the concatenated embedding and hidden state, and Llama layers after
    it (`later`).

    The first layer's modules are attributes of the drafter, so that a drafter of one layer keeps
    its tensor names on disk.
    """

    # Whether the next draft step reads the normed output.
    norm_output = False

    def __init__(self, target: Target, settings: EagleSettings) -> None:
        super().__init__()
        architecture = settings.architecture
        config = llama_config(target, layer_changes(target, architecture))
        self.read_target(target, settings.layers, lambda: default_layers(target.num_layers))
        self.window, self.start = settings.window, settings.start
        self.norm_before_residual = architecture["norm_before_residual"]
        rows = target.head.vocab_size
        width = target.width
        attention: type[Attention] = NormedAttention if architecture["qk_norm"] else Attention
        if is_latent(architecture):
            attention = LatentAttention
        vocab_size = min(settings.vocab_size, rows)

        def make_norm(size: int = width) -> nn.RMSNorm:
            return nn.RMSNorm(size, eps=config.rms_norm_eps)

        def make_mlp() -> nn.Module:
            return ExpertBlock(target) if architecture.get("experts") else Mlp(config)

        self.input_norm = (
            make_norm(len(self.fused_layers) * width) if architecture["norm_before_fc"] else None
        )
        self.fc_norm = (
            nn.ModuleList(make_norm() for _ in self.fused_layers)
            if architecture["fc_norm"]
            else None
        )
        self.embed_tokens = make_embedding(target, settings.own_embedding)
        self.fc = FeatureLinear(len(self.fused_layers) * width, width, bias=False)
        self.input_layernorm = make_norm()
        self.hidden_norm = make_norm()
        self.self_attn = attention(config, 2 * width, settings.window)
        self.post_attention_layernorm = make_norm()
        self.mlp = make_mlp()
        self.norm = make_norm()
        self.num_layers = settings.num_layers
        self.later = nn.ModuleList(
            LaterLayer(config, attention, settings.window, make_mlp)
            for _ in range(settings.num_layers - 1)
        )
        self.lm_down, self.lm_head = make_output_layer(width, vocab_size, settings.head_rank)
        self.rotary: RotaryFn = Rotary(config)
        self.has_dynamic_rope = depends_on_length(config.rope_parameters)
        self.add_vocabulary(vocab_size, rows)

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Choose the draft vocabulary and, unless `start` is random, initialise head, norm and `fc`
        from the target.

        The head and its norm are the target's, and fc passes on the last fused layer, so the first
        logits are near the target's own. The layers start at random: a copy of the target's last
        layer learns slower (measured on SmolLM2, 46k
        tokens: agreement 0.24 against 0.30), because that layer predicts the token that the drafter
        already reads.
        """
        ids = self.choose_vocabulary(token_counts)
        copy_embedding(self, target.device)
        if self.start == "random":
            return
        init_output_layer(self.lm_down, self.lm_head, self.head.output.weight[ids])
        init_from_target(self.fc, self.norm, target)

    def project_fused(self, fused: Tensor) -> Tensor:
        fused = fused.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            fused = self.input_norm(fused)
        if self.fc_norm is not None:
            parts = fused.chunk(len(self.fc_norm), dim=-1)
            fused = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        return super().project_fused(fused)

    def attention_inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of the first attention [B, T, 2 D], and the residual stream [B, T,
        D].
        """
        norms = [self.input_layernorm, self.hidden_norm]
        x, normed, hidden = join_norms([self.embed_inputs(tokens), hidden], norms)
        return x, normed if self.norm_before_residual else hidden

    def run_later_layers(self, hidden: Tensor, attend: EagleAttentionFn) -> Tensor:
        """Return the state [B, T, D] that the next draft step reads, from the residual stream
        after the first attention.
        """
        normed, hidden = norm_stream(hidden, self.post_attention_layernorm)
        hidden = hidden + self.mlp(normed)
        for number, layer in enumerate(self.later, 1):
            hidden = layer(hidden, number, attend)
        return norm_stream(hidden, self.norm)[0] if self.norm_output else hidden

    def run_layers(self, tokens: Tensor, hidden: Tensor, attend: EagleAttentionFn) -> Tensor:
        """Return the state [B, T, D] after all layers."""
        x, residual = self.attention_inputs(tokens, hidden)
        return self.run_later_layers(residual + attend(0, self.self_attn, x), attend)

    def head_inputs(self, hidden: Tensor) -> Tensor:
        """Return the inputs of `lm_head` from output states [.., D]."""
        normed = hidden if self.norm_output else norm_stream(hidden, self.norm)[0]
        return project_down(self.lm_down, normed)

    def run(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        cache: TreeCache,
        visible: Tensor | None,
    ) -> Tensor:
        """Run new nodes, append them to the cache, and return their output states [B, F, D]."""
        steps = accelerator().drafter_steps(self)
        if steps is not None:
            return steps.run(tokens, hidden, positions, cache, visible)
        rope = self.rotary(self.fc.weight.detach(), positions)
        if self.window is not None:
            cache.set_positions(positions)

        def attend(number: int, attention: Attention, x: Tensor) -> Tensor:
            return attention.attend_cached(*attention.project_qkv(x, rope), cache, visible, number)

        output = self.run_layers(tokens, hidden, attend)
        cache.add_uncommitted(tokens.shape[1])
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [B, F, V] from output states [B, F, D]."""
        logits: Tensor = self.lm_head(self.head_inputs(hidden))
        return logits

    def log_q(self, hidden: Tensor) -> Tensor:
        """Compute log q [B, F, V] from output states [B, F, D]."""
        steps = accelerator().drafter_steps(self)
        if steps is not None:
            return steps.log_q(hidden)
        return self.logits(hidden).float().log_softmax(-1)
