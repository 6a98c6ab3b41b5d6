"""The base of block drafters: layers that attend to the target's features as a context, and draft a
block in one pass.

Shapes: B batch, P new positions, N tokens, A anchors, S slots of a block, K drafts of it, W width,
V draft vocabulary, R judged drafts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spectrain.config.values import Count, LayerCount, NotNegative, Seed, Steps, VocabularySize
from spectrain.drafters.base import Losses, TrainingState
from spectrain.drafters.capabilities import ContextParallel, OnePassCost, SavedFiles
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import Projection
from spectrain.models.cache_types import AttentionOptions
from spectrain.models.kv_cache import TreeCache
from spectrain.models.target import Target
from spectrain.models.weight_block import BlockLinear, WeightBlock
from spectrain.trees.rollout import Draft, Rollout

from ..step_cost import BatchShape, Run, StepCost
from .anchors import Anchors, SharedAnchors, mean_chunk_keys, sample_anchors
from .fused_input import FusedDrafter, copy_embedding, make_embedding
from .judged_drafts import JudgedDrafts, SlotStates
from .llama_layer import (
    Mlp,
    NormedAttention,
    Rotary,
    append_and_attend,
    init_from_target,
    llama_config,
)
from .mask_token import check_mask_unused, resolve_mask_token
from .target_kind import (
    KIND_VARIANTS,
    ExpertBlock,
    LatentAttention,
    check_architecture,
    is_latent,
    layer_changes,
)
from .vocabulary import Supervision, judge_rows

Rope = tuple[Tensor, Tensor]
KeysValues = tuple[Tensor, Tensor]
BlockAttentionFn = Callable[[Tensor, Tensor, Tensor, KeysValues], Tensor]
"""(queries, keys, values of blocks, keys and values of the context) -> attention outputs, each
[.., heads, T, head size].
"""


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Settings of every block drafter."""

    # Number of slots in a block, the anchor's slot included.
    block_size: Steps = 16
    # Number of decoder layers of the drafter.
    num_layers: LayerCount = 5
    # Layers of the target whose hidden states are fused; null uses the family's default layers.
    layers: list[int] | None = None
    # Draft vocabulary in tokens; null uses the target's whole vocabulary.
    vocab_size: VocabularySize | None = None
    # Number of anchors that are trained per document.
    num_anchors: Count = 512
    # Decay length of the loss weights in slots: draft d, from 0, weighs exp(-d / decay); 0 weighs
    # all drafts alike.
    decay: NotNegative = 7.0
    # Whether each slot drafts the token after its own position, instead of the token at it.
    sample_from_anchor: bool = False
    # Whether attention inside a block is causal.
    causal: bool = False
    # Number of preceding positions that a slot attends to; null attends to all of them.
    window: Count | None = None
    # Token id of the mask; null picks an id that no text of the target holds.
    mask_token_id: int | None = None
    # True trains an input embedding of the drafter's own, with the mask token's row; false uses the
    # target's, frozen.
    own_embedding: bool = False
    # Configuration keys of the drafter's layers that differ from the target's; null copies the
    # target's. With latent_attention or experts, the layers have these parts of the target's kind.
    architecture: dict[str, Any] | None = None
    # Initial values of fc and the final norm: the target's (target), or random ones (random).
    start: Literal["target", "random"] = "target"
    # Seed of the drafter's random choices.
    seed: Seed = 0


class BlockLayer(WeightBlock):
    """Qwen3's decoder layer, whose attention also reads a context. The layer does not norm the
    context.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn: NormedAttention | LatentAttention = NormedAttention(
            config, config.hidden_size
        )
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp: nn.Module = Mlp(config)

    def forward(
        self, x: Tensor, rope: Rope, context: Tensor, context_rope: Rope, attend: BlockAttentionFn
    ) -> Tensor:
        """Transform block states [A, S, W] with a context [.., W]; `attend` computes attention from
        the block's queries, keys and values and the context's keys and values.
        """
        context_kv = self.self_attn.project_kv(context, context_rope)
        qkv = self.self_attn.project_qkv(self.input_layernorm(x), rope)
        x = x + self.self_attn.project_output(attend(*qkv, context_kv))
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockDrafter(FusedDrafter):
    """Layers over blocks of mask tokens, with the target's fused features as further keys and
    values in every layer.

    The embedding and the output layer are the target's and stay frozen. `vocab_size` restricts the
    output layer to the tokens that the assistant uses most.
    """

    saved = SavedFiles(
        shape=(
            "vocab_size",
            "layers",
            "num_layers",
            "architecture",
            "sample_from_anchor",
            "causal",
            "window",
            "mask_token_id",
            "own_embedding",
        ),
    )
    capabilities = replace(FusedDrafter.capabilities, cost=OnePassCost)
    # Where the labels of a cross-entropy and of the accuracy come from.
    label_source: Literal["data", "target"] = "target"

    def __init__(
        self, target: Target, config: BlockConfig, layer: Callable[[Any], BlockLayer] = BlockLayer
    ) -> None:
        super().__init__()
        min_size = 1 if config.sample_from_anchor else 2
        if config.block_size < min_size:
            raise UserError(
                f"drafter.block_size={config.block_size}: use {min_size} or more, as slot 0 holds "
                "the anchor"
            )
        architecture = check_architecture(config.architecture or {}, KIND_VARIANTS)
        rows = target.head.vocab_size
        layer_config = llama_config(target, layer_changes(target, architecture))
        self.read_target(
            target, config.layers, lambda: default_layers(target.num_layers, config.num_layers)
        )
        self.block_size, self.sample_from_anchor = config.block_size, config.sample_from_anchor
        self.causal = config.causal
        self.window = config.window
        self.num_anchors = config.num_anchors
        self.start, self.seed, self.decay = config.start, config.seed, config.decay
        self.mask_token_id = resolve_mask_token(target, config.mask_token_id)
        self.saved = replace(self.saved, settings={"mask_token_id": self.mask_token_id})
        width = target.width
        self.embed_tokens = make_embedding(target, config.own_embedding)
        self.fc = BlockLinear(len(self.fused_layers) * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps=layer_config.rms_norm_eps)
        self.blocks = nn.ModuleList(layer(layer_config) for _ in range(config.num_layers))
        for block in self._block_layers:
            if is_latent(architecture):
                block.self_attn = LatentAttention(layer_config, width)
            if architecture["experts"]:
                block.mlp = ExpertBlock(target)
        self.norm = nn.RMSNorm(width, eps=layer_config.rms_norm_eps)
        size = rows if config.vocab_size is None else min(config.vocab_size, rows)
        self.lm_head: nn.Linear | None = None
        if size < rows:
            bias = target.head.output.bias is not None
            self.lm_head = nn.Linear(width, size, bias=bias).requires_grad_(False)
        self.add_vocabulary(size, rows)
        self.rotary = Rotary(layer_config)
        self.capabilities = replace(
            self.capabilities,
            context_parallel=ContextParallel(
                self.num_drafts, self._block_layers[0].self_attn.num_heads
            ),
        )

    @property
    def first_draft_slot(self) -> int:
        """The first slot that drafts: slot s predicts the token after that of slot s -
        `first_draft_slot`.
        """
        return 0 if self.sample_from_anchor else 1

    @property
    def _block_layers(self) -> list[BlockLayer]:
        return list(self.blocks)  # type: ignore[arg-type]

    @property
    def num_drafts(self) -> int:
        return self.block_size - self.first_draft_slot

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Choose the draft vocabulary and, unless `start` is random, initialise `fc` and the norm
        from the target.

        Then `fc` passes on the last fused layer, and the norm is the target's final one. The layers
        start at random, because copies of the target's last layers learnt no faster.
        """
        check_mask_unused(self.mask_token_id, token_counts)
        ids = self.choose_vocabulary(token_counts)
        with torch.no_grad():
            if self.lm_head is not None:
                for parameter, target_parameter in zip(
                    self.lm_head.parameters(), self.head.output.parameters()
                ):
                    parameter.copy_(target_parameter[ids])
        copy_embedding(self, target.device)
        if self.start == "target":
            init_from_target(self.fc, self.norm, target)

    # Training

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of the layers over the slots of the blocks after the sampled anchors."""
        anchors = min(batch.supervised, batch.texts * self.num_anchors)
        slots = anchors * self.block_size
        context = [
            linear for layer in self._block_layers for linear in layer.self_attn.key_value_linears
        ]
        runs = [
            Run(
                self.blocks,
                slots,
                batch.length / 2 + self.block_size,
                chunk_keys=mean_chunk_keys(anchors / batch.texts, self.block_size, batch.length),
            ),
            Run(nn.ModuleList(context), batch.tokens, 0),
            Run(self.fc, batch.tokens, 0),
        ]
        return StepCost(runs, judge_rows(self, batch, anchors * self.num_drafts))

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Train a block after every sampled anchor, all in one forward."""
        anchors = sample_anchors(batch, self.num_anchors, self.seed, state.step)
        slots = SlotStates(self._training_states(batch, anchors, state), self.first_draft_slot)
        supervision = Supervision(self, batch, label_source=self.label_source)
        own = SharedAnchors.share_anchors(anchors, batch).own
        return self.judge_drafts(JudgedDrafts(supervision, batch, own, slots, state.progress))

    @abstractmethod
    def judge_drafts(self, drafts: JudgedDrafts) -> Losses:
        """Compute the losses of the supervised drafts."""

    def _training_states(self, batch: Batch, anchors: Anchors, state: TrainingState) -> Tensor:
        """Compute the normed states [A, S, W] of the blocks of this process."""
        shared = SharedAnchors.share_anchors(anchors, batch)
        context = self.fuse_features(batch.input_features)
        # Some scalings of the rotary embedding depend on the last position of all processes.
        cos, sin = self.rotary(context, batch.positions)
        context_rope = batch.piece.cut_columns(cos), batch.piece.cut_columns(sin)
        x = self.embed_blocks(batch.tokens.flatten()[shared.own.token_indices])
        cos, sin = self.rotary(
            x, anchors.positions[:, None] + torch.arange(self.block_size, device=x.device)
        )
        rope = cos[shared.own_index], sin[shared.own_index]
        attend = partial(shared.attend_blocks, causal=self.causal, window=self.window)
        for layer in self.blocks:
            x = state.run_checkpointed(layer, x, rope, context, context_rope, attend)
        return self.norm(x)

    def project_fused(self, fused: Tensor) -> Tensor:
        """Project concatenated layers to the context [.., W] that every layer reads."""
        return self.hidden_norm(super().project_fused(fused))

    def embed_blocks(self, roots: Tensor) -> Tensor:
        """Embed the blocks [A, S, W] of anchor tokens [A]: the token, then mask tokens."""
        tokens = torch.cat(
            [roots[:, None], roots.new_full((len(roots), self.block_size - 1), self.mask_token_id)],
            dim=1,
        )
        return self.embed_inputs(tokens)

    @property
    def projection(self) -> Projection:
        """The output layer over the draft vocabulary, with the target's scale and cap."""
        target_projection = self.head.projection
        if self.lm_head is None:
            return target_projection
        return replace(target_projection, weight=self.lm_head.weight, bias=self.lm_head.bias)

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Read the features of the last accepted tokens, then run the block of the root once."""
        self.cache = context.drafting_cache(self.cache, len(self.blocks), 1 + self.block_size)
        return Draft(
            self.make_rollout(
                context,
                SlotStates(self._decoding_states(context, self.cache), self.first_draft_slot),
            )
        )

    @abstractmethod
    def make_rollout(self, context: Context, slots: SlotStates) -> Rollout:
        """Return a rollout from the roots and the states of their blocks."""

    def _decoding_states(self, context: Context, cache: TreeCache) -> Tensor:
        """Compute the normed states [B, S, W] of the block after each root; only the context
        stays in the cache.
        """
        target_context = self.fuse_features(context.new_features)
        x = self.embed_blocks(context.root)
        counts = context.num_new[:, None]
        num_new = target_context.shape[1]
        slots = self.block_size
        steps = torch.arange(num_new + slots, device=x.device)
        offsets = torch.where(steps < num_new, steps, steps - num_new + counts)
        positions = cache.lengths[:, None] + offsets
        block_mask = torch.ones(slots, slots, dtype=torch.bool, device=x.device)
        block_mask = block_mask.tril() if self.causal else block_mask
        is_new = (steps[:num_new] < counts)[:, None].expand(-1, slots, -1)
        visible = torch.cat([is_new, block_mask.expand(len(x), -1, -1)], dim=2)
        cos, sin = self.rotary(x, positions)
        for index, layer in enumerate(self._block_layers):

            def attend(
                q: Tensor, k: Tensor, v: Tensor, context_kv: KeysValues, index: int = index
            ) -> Tensor:
                keys, values = (torch.cat(parts, dim=2) for parts in zip(context_kv, (k, v)))
                return append_and_attend(
                    q,
                    keys,
                    values,
                    cache,
                    visible,
                    index,
                    AttentionOptions(window=self.window),
                    positions,
                )

            rope = cos[:, num_new:], sin[:, num_new:]
            x = layer(x, rope, target_context, (cos[:, :num_new], sin[:, :num_new]), attend)
        cache.add_uncommitted(num_new + slots)
        cache.commit(None, context.num_new)
        return self.norm(x)

    def compute_products(self, states: Tensor) -> Tensor:
        """Multiply states [.., W] by the output layer: [.., V] in float32, before the target's
        scale and cap.
        """
        lm_head = self.head.output if self.lm_head is None else self.lm_head
        return lm_head(states.to(lm_head.weight.dtype)).float()

    def log_q(self, product: Tensor) -> Tensor:
        """Compute log q [.., V] from products [.., V]."""
        return self.head.scale_and_cap(product).log_softmax(-1)


def default_layers(num_layers: int, count: int) -> list[int]:
    """Return DFlash's default layers (arXiv 2602.06036): the one after the middle layer, or those
    after `count` evenly spaced layers from the second to the third from the end."""
    if count == 1:
        return [num_layers // 2 + 1]
    fused = (round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))
    return sorted({min(max(layer, 0), num_layers - 1) + 1 for layer in fused})
