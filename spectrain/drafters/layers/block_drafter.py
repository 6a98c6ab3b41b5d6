"""The base of block drafters: layers that attend to the target's features as a context, and draft a block in one pass.

Shapes: B batch, P fresh positions, N tokens, A anchors, S slots of a block, K drafts of it, W width, V draft vocabulary,
R judged drafts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from spectrain.drafters.base import Losses, Stage, TrainingState
from spectrain.drafters.capabilities import Capture, OnePassCost, SavedFiles
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import Projection
from spectrain.models.features import Features, Layer
from spectrain.models.kv_cache import AttentionOptions, TreeCache
from spectrain.trees.base import Draft, Rollout

from .anchors import Anchors, block_attention, sample_anchors
from .layers import Mlp, NormedAttention, append_and_attend, init_from_target, llama_config, make_rotary
from .vocabulary import Supervision, VocabularyDrafter

if TYPE_CHECKING:
    from spectrain.models.target import Target

LAYER_KEYS = (
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters",
    "max_position_embeddings",
)  # fmt: skip
BlockAttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]
Rope = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class BlockSettings:
    """Settings of every block drafter; DFlash describes each."""

    block_size: int
    num_layers: int
    layers: list[int] | None
    vocab_size: int | None
    sample_from_anchor: bool
    causal: bool
    window: int | None
    num_anchors: int
    mask_token_id: int | None
    own_embedding: bool
    architecture: dict[str, Any] | None
    start: str
    seed: int


class BlockLayer(nn.Module):
    """Qwen3's decoder layer, whose attention also reads a context. The layer does not norm the context."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = NormedAttention(config, config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, rope: Rope, attend: BlockAttentionFn) -> Tensor:
        """Transform block states [A, S, W]; `attend` computes attention from the block's queries, keys and values."""
        x = x + self.self_attn.project_output(attend(*self.self_attn.project_qkv(self.input_layernorm(x), rope)))
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockDrafter(VocabularyDrafter):
    """Layers over blocks of mask tokens, with the target's fused features as further keys and values in every layer.

    The embedding and the output layer are the target's and stay frozen. `vocab_size` restricts the output layer to the tokens
    that the assistant uses most.
    """

    saved = SavedFiles(
        shape=(
            "vocab_size", "layers", "num_layers", "architecture", "sample_from_anchor", "causal", "window", "mask_token_id",
            "own_embedding",
        ),
    )  # fmt: skip
    capabilities = replace(VocabularyDrafter.capabilities, capture=Capture(state_names=("cache",)), on_policy=None)
    _cost_type = OnePassCost
    # Where the labels of a cross-entropy and of the accuracy come from.
    label_source: Literal["data", "target"] = "target"

    def __init__(self, target: Target, settings: BlockSettings, layer: Callable[[Any], BlockLayer] = BlockLayer) -> None:
        super().__init__()
        min_size = 1 if settings.sample_from_anchor else 2
        if settings.block_size < min_size:
            raise UserError(f"drafter.block_size={settings.block_size}: use {min_size} or more, as slot 0 holds the anchor")
        for key in settings.architecture or {}:
            if key not in LAYER_KEYS:
                raise UserError(f"drafter.architecture.{key}: there is no such key; use one of {', '.join(LAYER_KEYS)}")
        rows = target.head.vocab_size
        config = llama_config(target, settings.architecture)
        layers = settings.layers
        fused = default_layers(target.num_layers, settings.num_layers) if layers is None else sorted(set(layers))
        if not fused:
            raise UserError("drafter.layers=[]: name at least one layer, or leave it out")
        target.check_layers(fused)
        self.fused_layers: tuple[Layer, ...] = tuple(fused)
        self.layers = (*self.fused_layers, "final")
        self.block_size, self.sample_from_anchor = settings.block_size, settings.sample_from_anchor
        self.causal, self.window, self.num_anchors = settings.causal, settings.window, settings.num_anchors
        self.start, self.seed = settings.start, settings.seed
        self.mask_token_id = resolve_mask_token(target, settings.mask_token_id)
        self.saved = replace(self.saved, settings={"mask_token_id": self.mask_token_id})
        self.head, width = target.head, target.width
        self.embed_tokens = nn.Embedding(rows, width) if settings.own_embedding else None
        self.fc = nn.Linear(len(fused) * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.blocks = nn.ModuleList(layer(config) for _ in range(settings.num_layers))
        self.norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        size = rows if settings.vocab_size is None else min(settings.vocab_size, rows)
        self.lm_head: nn.Linear | None = None
        if size < rows:
            bias = target.head.output.bias is not None
            self.lm_head = nn.Linear(width, size, bias=bias).requires_grad_(False)
        self.add_vocabulary(size, rows)
        self.rotary = make_rotary(config)
        self.cache: TreeCache | None = None

    @property
    def first_draft_slot(self) -> int:
        """The first slot that drafts: slot s predicts the token after that of slot s - `first_draft_slot`."""
        return 0 if self.sample_from_anchor else 1

    @property
    def _block_layers(self) -> list[BlockLayer]:
        return list(self.blocks)  # type: ignore[arg-type]

    @property
    def num_drafts(self) -> int:
        return self.block_size - self.first_draft_slot

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Choose the draft vocabulary and, unless `start` is random, initialise `fc` and the norm from the target.

        Then `fc` passes on the last fused layer, and the norm is the target's final one. The layers start at random, because
        copies of the target's last layers learnt no faster.
        """
        check_mask_unused(self.mask_token_id, token_counts)
        ids = self.choose_vocabulary(token_counts)
        with torch.no_grad():
            if self.lm_head is not None:
                for parameter, target_parameter in zip(self.lm_head.parameters(), self.head.output.parameters()):
                    parameter.copy_(target_parameter[ids])
            if self.embed_tokens is not None:
                self.embed_tokens.weight.copy_(self.head.all_embeddings(target.device))
        if self.start == "target":
            init_from_target(self.fc, self.norm, target)

    # Training

    @property
    def stages(self) -> list[Stage]:
        return [Stage.whole(self, self.layers, final_reach=0)]

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Train a block after every sampled anchor, all in one forward.

        Draft d of the anchor at p is compared with the target's distribution at p + d, as far as the tokens before it carry
        loss without a gap.
        """
        assert batch.features is not None
        anchors = sample_anchors(batch, self.num_anchors, self.seed, state.step)
        hidden = self._training_states(batch, anchors, state)[:, self.first_draft_slot :]
        supervision = Supervision(self, batch, label_source=self.label_source)
        rows = supervision.row_index.flatten()
        depths = torch.arange(self.num_drafts, device=rows.device)
        label_positions = anchors.token_indices[:, None] + depths
        label_index = torch.where(label_positions < len(rows), rows[label_positions.clamp(max=len(rows) - 1)], -1)
        is_judged = (label_index >= 0).long().cumprod(1).bool()
        return self.judge_drafts(
            JudgedDrafts(self, supervision, batch, anchors, hidden, label_index, is_judged, depths.expand_as(label_index))
        )

    @abstractmethod
    def judge_drafts(self, drafts: JudgedDrafts) -> Losses:
        """Compute the losses of the supervised drafts."""

    def _training_states(self, batch: Batch, anchors: Anchors, state: TrainingState) -> Tensor:
        """Compute the normed states [A, S, W] of every block."""
        assert batch.features is not None
        positions = batch.positions.expand_as(batch.tokens).reshape(1, -1)
        context = self.project_context(batch.features).flatten(0, 1)[None]
        context_rope = self.rotary(context, positions)
        x = self.embed_blocks(batch.tokens.flatten()[anchors.token_indices])
        rope = self.rotary(x, anchors.positions[:, None] + torch.arange(self.block_size, device=x.device))
        for layer in self.blocks:
            x = state.checkpointed(self._run_training_layer, layer, x, rope, context, context_rope, anchors)
        return self.norm(x)

    def _run_training_layer(
        self, layer: BlockLayer, x: Tensor, rope: Rope, context: Tensor, context_rope: Rope, anchors: Anchors
    ) -> Tensor:
        context_kv = layer.self_attn.project_kv(context, context_rope)
        return layer(x, rope, lambda q, k, v: block_attention(q, k, v, context_kv, anchors, self.causal, self.window))

    def project_context(self, features: Features) -> Tensor:
        """Project the target's fused layers to the context [.., W] that every layer reads."""
        return self.hidden_norm(self.fc(features.fuse_layers(self.fused_layers).to(self.fc.weight.dtype)))

    def embed_blocks(self, roots: Tensor) -> Tensor:
        """Embed the blocks [A, S, W] of anchor tokens [A]: the token, then mask tokens."""
        tokens = torch.cat([roots[:, None], roots.new_full((len(roots), self.block_size - 1), self.mask_token_id)], dim=1)
        if self.embed_tokens is not None:
            return self.embed_tokens(tokens).to(self.fc.weight.dtype)
        with torch.no_grad():
            return self.head.embed(tokens).to(self.fc.weight.dtype)

    @property
    def projection(self) -> Projection:
        """The output layer over the draft vocabulary, with the target's scale and cap."""
        target_projection = self.head.projection
        return (
            target_projection
            if self.lm_head is None
            else replace(target_projection, weight=self.lm_head.weight, bias=self.lm_head.bias)
        )

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Read the features of the last accepted tokens, then run the block of the root once."""
        self.cache = context.drafting_cache(self.cache, len(self.blocks), 1 + self.block_size)
        return Draft(self.make_rollout(context.root, self._decoding_states(context, self.cache)[:, self.first_draft_slot :]))

    @abstractmethod
    def make_rollout(self, root: Tensor, states: Tensor) -> Rollout:
        """Return a rollout from the roots [B] and the states [B, K, W] of the drafting slots."""

    def _decoding_states(self, context: Context, cache: TreeCache) -> Tensor:
        """Compute the normed states [B, S, W] of the block after each root; only the context stays in the cache."""
        target_context, x, counts = (
            self.project_context(context.fresh),
            self.embed_blocks(context.root),
            context.counts[:, None],
        )
        num_new, slots = target_context.shape[1], self.block_size
        steps = torch.arange(num_new + slots, device=x.device)
        offsets = torch.where(steps < num_new, steps, steps - num_new + counts)
        positions = cache.lengths[:, None] + offsets
        block_mask = torch.ones(slots, slots, dtype=torch.bool, device=x.device)
        block_mask = block_mask.tril() if self.causal else block_mask
        is_new = (steps[:num_new] < counts)[:, None].expand(-1, slots, -1)
        visible = torch.cat([is_new, block_mask.expand(len(x), -1, -1)], dim=2)
        cos, sin = self.rotary(x, positions)
        for index, layer in enumerate(self._block_layers):
            context_kv = layer.self_attn.project_kv(target_context, (cos[:, :num_new], sin[:, :num_new]))

            def attend(
                q: Tensor, k: Tensor, v: Tensor, index: int = index, context_kv: tuple[Tensor, Tensor] = context_kv
            ) -> Tensor:
                keys, values = (torch.cat(parts, dim=2) for parts in zip(context_kv, (k, v)))
                return append_and_attend(
                    q, keys, values, cache, visible, index, AttentionOptions(window=self.window), positions
                )

            x = layer(x, (cos[:, num_new:], sin[:, num_new:]), attend)
        cache.add_uncommitted(num_new + slots)
        cache.commit(None, context.counts)
        return self.norm(x)

    def compute_products(self, states: Tensor) -> Tensor:
        """Multiply states [.., W] by the output layer: [.., V] in float32, before the target's scale and cap."""
        lm_head = self.head.output if self.lm_head is None else self.lm_head
        return lm_head(states.to(lm_head.weight.dtype)).float()

    def scale_and_cap(self, product: Tensor) -> Tensor:
        """Apply the target's scale and cap to products [.., V]."""
        return self.head.scale_and_cap(product)

    def log_q(self, product: Tensor) -> Tensor:
        """Compute log q [.., V] from products [.., V]."""
        return self.scale_and_cap(product).log_softmax(-1)


class JudgedDrafts:
    """The supervised drafts of a batch, flat and ordered by their labels' rows, as a block drafter's loss reads them."""

    def __init__(
        self,
        drafter: BlockDrafter,
        supervision: Supervision,
        batch: Batch,
        anchors: Anchors,
        hidden: Tensor,
        label_index: Tensor,
        is_judged: Tensor,
        depths: Tensor,
    ) -> None:
        self.drafter, self.supervision, self.anchors, self.is_judged = drafter, supervision, anchors, is_judged
        self.label_index, self.order = label_index[is_judged].sort(stable=True)  # [R]
        self.states = hidden  # [A, K, W]
        tokens = F.pad(batch.tokens.flatten(), (0, self.drafter.num_drafts))
        positions = anchors.token_indices[:, None] + depths
        # [A, K] tokens of the data before each draft, and at its position.
        self.previous_tokens, self.tokens = tokens[positions], tokens[positions + 1]
        self.hidden, self.depths = self.select_judged(hidden), self.select_judged(depths)  # [R, W], [R]

    def select_judged(self, slots: Tensor) -> Tensor:
        """Select values [A, K, ..] of the supervised drafts, in order [R, ..]."""
        return slots[self.is_judged][self.order]

    def normalize_weights(self, weights: Tensor) -> Tensor:
        """Scale weights [A, K] of drafts so that those of a document sum to its number of supervised tokens; return [R]."""
        document, tokens = self.anchors.supervised_tokens
        totals = torch.zeros(len(tokens), device=weights.device).index_add(0, document, (weights * self.is_judged).sum(1))
        return self.select_judged(weights * (tokens / totals.clamp(min=1e-9))[document][:, None])

    def decayed_weights(self, decay: float) -> Tensor:
        """Return the normalised loss weights [R] of the drafts: exp(-d / decay), or equal weights if the decay is 0."""
        depths = torch.arange(self.drafter.num_drafts, device=self.is_judged.device)
        weights = torch.exp(-depths / decay) if decay else torch.ones_like(depths, dtype=torch.float32)
        return self.normalize_weights(weights.expand(self.is_judged.shape))

    def sum_losses(self, terms: dict[str, Tensor], predictions: Tensor) -> Losses:
        """Return the losses with hits per depth, from the predictions [R], as draft ids."""
        correct = self.drafter.draft_ids[predictions] == self.supervision.labels[self.label_index]
        return Losses.by_depth(terms, correct, self.depths, self.drafter.num_drafts)


def default_layers(num_layers: int, count: int) -> list[int]:
    """Return DFlash's default layers (arXiv 2602.06036): the one after the middle layer, or those after `count` evenly spaced
    layers from the second to the third from the end."""
    if count == 1:
        return [num_layers // 2 + 1]
    fused = (round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))
    return sorted({min(max(layer, 0), num_layers - 1) + 1 for layer in fused})


def resolve_mask_token(target: Target, mask_token_id: int | None) -> int:
    """Return the mask token's id: the given one, or if it is None, one that no text of the target holds."""
    rows = target.head.vocab_size
    if mask_token_id is None:
        return find_unused_token(target.tokenizer, rows)
    if not 0 <= mask_token_id < rows:
        raise UserError(f"drafter.mask_token_id={mask_token_id}: use an id below {rows}")
    return mask_token_id


def check_mask_unused(mask: int, token_counts: Tensor) -> None:
    """Raise `UserError` if the data holds the mask token."""
    if token_counts[mask]:
        raise UserError(f"drafter.mask_token_id={mask}: the data holds this token; use a token that no text holds")


def find_unused_token(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """Return the id of an embedding row that no text holds.

    This is the tokenizer's mask token, a row beyond its tokens, or the last special token that neither begins nor ends a text
    nor occurs in the chat template.
    """
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    if len(tokenizer) < vocab_size:
        return len(tokenizer)
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    boundaries = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    special = [id for id, token in tokenizer.added_tokens_decoder.items() if token.special]
    candidates = [id for id in special if id not in boundaries and str(tokenizer.added_tokens_decoder[id]) not in template]
    if not candidates:
        raise UserError("drafter.mask_token_id: the target has no token that texts never hold; use the id of the rarest one")
    return int(max(candidates))
