"""P-EAGLE (arXiv 2602.01469): EAGLE-3's layers draft all tokens in one pass, through masks after
the last token.

Shapes: B batch, T tokens, N = B T positions, C masks, K drafts, D target width, V draft vocabulary,
P new positions. Index t pairs the target's features at t with the embedding of token t + 1, and
predicts token t + 2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.config.values import Count, LayerCount, Seed, Share, Steps, VocabularySize, Width
from spectrain.drafters.layers.chains import Chains, ConditionalDrop, sample_chains
from spectrain.drafters.layers.chunked_attention import attend_chunks
from spectrain.drafters.layers.eagle_layers import (
    NORM_VARIANTS,
    EagleDrafter,
    EagleSettings,
)
from spectrain.drafters.layers.llama_layer import Attention
from spectrain.drafters.layers.losses import LossName
from spectrain.drafters.layers.mask_token import check_mask_unused, resolve_mask_token
from spectrain.drafters.layers.target_kind import check_architecture
from spectrain.drafters.layers.vocabulary import Supervision, judge_rows
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.features.context_piece import UnrolledRows
from spectrain.models.cache_types import AttentionOptions
from spectrain.models.host_copies import copy_to_device, on_host
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft, MarginalRollout

from .base import Losses, TrainingState
from .capabilities import ContextParallel, OnePassCost, SavedFiles
from .context import Context
from .layers.unrolled_attention import unrolled_attention
from .step_cost import BatchShape, Run, StepCost

NUM_DRAFTS = 8


class PEagle(EagleDrafter):
    """EAGLE-3's layers, with `num_drafts` - 1 masks after the root.

    A mask is the mask token's embedding with one learned `mask_hidden` instead of the target's
    features. Training supervises every position and masks after some of them: a share max(keep^d,
    keep_least) of the positions has the mask of depth d, and each mask sees the masks before it.
    All predictions have equal weight. `layers`, `window` and `architecture` are EAGLE-3's, without
    its variants of a later step or of the embedding.
    """

    saved = SavedFiles(
        shape=(
            "vocab_size",
            "layers",
            "num_layers",
            "window",
            "mask_token_id",
            "own_embedding",
            "head_rank",
            "architecture",
        )
    )
    capabilities = replace(EagleDrafter.capabilities, cost=OnePassCost)

    def __init__(
        self,
        target: Target,
        # Number of draft tokens that one forward proposes, at least 2.
        num_drafts: Steps = NUM_DRAFTS,
        # Draft vocabulary in tokens; larger values are capped at the target's vocabulary.
        vocab_size: VocabularySize = 32000,
        # Layers of the target whose hidden states are fused; null uses the family's default layers.
        layers: list[int] | None = None,
        # Number of decoder layers of the drafter.
        num_layers: LayerCount = 4,
        # Number of preceding positions that a token attends to; null attends to all of them.
        window: Count | None = None,
        # Divergence between the target's and the drafter's token distributions.
        loss: LossName = "forward_kl",
        # Factor from 0 to 1 by which the share of trained positions falls with each further mask.
        keep: Share = 0.7,
        # Smallest share of the positions that any mask is trained behind.
        keep_least: Share = 0.2,
        # Token id of the mask; null picks an id that no text of the target holds.
        mask_token_id: int | None = None,
        # True trains an input embedding of the drafter's own, with the mask token's row; false uses
        # the target's, frozen.
        own_embedding: bool = True,
        # Initial values of the output layer and fc: the target's (target), or random ones (random).
        start: Literal["target", "random"] = "target",
        # Rank of the factorised output layer (SlimSpec); null uses a full-rank layer.
        head_rank: Width | None = None,
        # Configuration keys and norm variants of the layers that differ from the target's; null
        # copies the target's.
        architecture: dict[str, Any] | None = None,
        # Seed of the conditional drop of masks.
        seed: Seed = 0,
    ) -> None:
        complete = check_architecture(architecture or {}, NORM_VARIANTS)
        settings = EagleSettings(
            num_layers, layers, vocab_size, window, start, own_embedding, head_rank, complete
        )
        super().__init__(target, settings)
        if num_drafts < 2:
            raise UserError(
                f"drafter.num_drafts={num_drafts}: use 2 or more; drafter=eagle3 drafts one token "
                "at a time"
            )
        self.num_drafts = num_drafts
        self.capabilities = replace(
            self.capabilities,
            context_parallel=ContextParallel(num_drafts, self.self_attn.num_heads),
        )
        self.divergence = loss
        self.drop = ConditionalDrop(num_drafts, keep, keep_least, seed)
        self.mask_token_id = resolve_mask_token(target, mask_token_id)
        self.saved = replace(self.saved, settings={"mask_token_id": self.mask_token_id})
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features))

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Start as EAGLE-3 does; raise `UserError` if the data holds the mask token."""
        check_mask_unused(self.mask_token_id, token_counts)
        super().prepare(target, token_counts)

    # Training

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of the layers over all tokens and masks."""
        share = self.drop.masks_per_token
        rows = batch.tokens + share * batch.supervised
        return StepCost(
            [Run(self, rows, batch.length)], judge_rows(self, batch, (1 + share) * batch.supervised)
        )

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Return the loss of all positions and their chains of masks from one forward.

        The label of position t is the target's distribution at t + 1, that of its mask of depth d
        the one at t + d + 1.
        """
        all_chains = sample_chains(batch, self.drop, state.step)
        chains = all_chains.select_own(batch)
        states = self._trained_states(batch, all_chains, state)
        supervision = Supervision(self, batch)
        # Rows are chosen and ordered on the host.
        is_supervised = on_host(supervision.is_supervised(0))
        rows = is_supervised.flatten().nonzero()[:, 0]
        documents = _document_index(batch)
        row_documents = batch.piece.cut_columns(documents.view_as(batch.tokens))[is_supervised]
        label_documents = torch.cat([row_documents, documents[on_host(chains.anchors)]])
        depths = torch.cat([torch.zeros_like(rows), on_host(chains.depths)])
        own = torch.arange(len(chains.depths), device="cpu")
        state_index = torch.cat([rows, is_supervised.numel() + own])
        chain_rows = on_host(supervision.row_index).flatten()[on_host(chains.label_positions)]
        label_index, order = torch.cat([on_host(supervision.label_index(0)), chain_rows]).sort(
            stable=True
        )
        weights = chains.document_weights(label_documents)[order]
        device = states.device
        label_index, state_index, depths, weights = (
            copy_to_device(part, device)
            for part in (label_index, state_index[order], depths[order], weights)
        )
        hidden = self.head_inputs(states[0, state_index])
        loss, right = supervision.judge_states(hidden, self.lm_head, label_index, weights)
        return Losses.by_depth({self.divergence: loss}, right, depths, self.num_drafts)

    def _trained_states(self, batch: Batch, all_chains: Chains, state: TrainingState) -> Tensor:
        """Return the states [1, N + C, D] of the positions of this process, then of its masks."""
        piece = batch.piece
        chains = all_chains.select_own(batch)
        count = len(chains.depths)
        masks = self.project_fused(self.mask_hidden).expand(-1, count, -1)
        hidden = torch.cat(
            [self.fuse_features(batch.input_features).flatten(0, 1)[None], masks], dim=1
        )
        # The token that rolls in from beyond a document's end is never supervised.
        next_tokens = piece.cut_columns(batch.tokens.roll(-1, dims=1)).reshape(1, -1)
        tokens = torch.cat(
            [next_tokens, next_tokens.new_full((1, count), self.mask_token_id)], dim=1
        )
        positions = batch.positions.expand_as(batch.tokens).reshape(1, -1)
        positions = torch.cat([positions, positions[:, chains.anchors] + chains.depths], dim=1)
        # Some scalings of the rotary embedding depend on the last position of the complete text.
        cos, sin = self.rotary(self.fc.weight.detach(), positions)
        own = torch.arange(batch.tokens.numel() + count, device=tokens.device)
        rows, mask_rows = own.split([batch.tokens.numel(), count])
        own = torch.cat([piece.cut_columns(rows.view_as(batch.tokens)).flatten(), mask_rows])
        rope = cos[:, own], sin[:, own]
        seen_chains = all_chains if piece.attends_all_slots else chains
        owners = piece.find_owners(all_chains.anchors % batch.tokens.shape[1])

        def mix_values(*qkv: Tensor) -> Tensor:
            (q, own_q), (k, own_k), (v, own_v) = (
                part.split([next_tokens.numel(), count], 2) for part in qkv
            )
            # [1, heads, B t, D] -> [B, heads, t, D]
            rows = (
                part[0].unflatten(1, (len(batch.tokens), -1)).transpose(0, 1) for part in (q, k, v)
            )
            q, k, v = piece.exchange_qkv(*rows)
            options = AttentionOptions(window=self.window)
            attended = piece.attend_unrolled(
                unrolled_attention, UnrolledRows(q, [k], [v], batch.lengths, options)
            )
            context = k.transpose(0, 1).flatten(1, 2)[None], v.transpose(0, 1).flatten(1, 2)[None]
            mask_qkv = piece.exchange_slots((own_q, own_k, own_v), owners)
            attended_masks = attend_chunks(
                mask_qkv,
                context,
                seen_chains.chunks,
                (seen_chains.anchors, seen_chains.depths),
                window=self.window,
            )
            masks = piece.return_slots(attended_masks, owners)
            return torch.cat([attended.transpose(0, 1).flatten(1, 2)[None], masks], dim=2)

        def attend(number: int, attention: Attention, x: Tensor) -> Tensor:
            outputs: Tensor = attention(x, rope, mix_values)
            return outputs

        states: Tensor = state.run_checkpointed(self.run_layers, tokens, hidden, attend)
        return states

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Run the pairs of the last accepted tokens, the last one the root's, and the masks in
        one forward.
        """
        self.cache = context.drafting_cache(self.cache, self.num_layers, 1 + self.num_drafts)
        fused = context.new_features.fuse_layers(self.fused_layers)
        masks = self.num_drafts - 1
        width = fused.shape[1] + masks
        is_pair = torch.arange(width, device=fused.device) < context.num_new[:, None]
        tokens = torch.where(is_pair, F.pad(context.next_tokens, (0, masks)), self.mask_token_id)
        fused = torch.where(
            is_pair[..., None], F.pad(fused, (0, 0, 0, masks)), self.mask_hidden.to(fused.dtype)
        )
        output = self.run(
            tokens, self.project_fused(fused), self.cache.next_slots(width), self.cache, None
        )
        self.cache.commit(None, context.num_new)
        slots = (context.num_new - 1).clamp(min=0)[:, None] + torch.arange(
            self.num_drafts, device=fused.device
        )
        states = output.gather(1, slots[..., None].expand(-1, -1, output.shape[-1]))
        return Draft(MarginalRollout(context.root, self.log_q(states), self.draft_ids))


def _document_index(batch: Batch) -> Tensor:
    """Return the index [N] of the document of every position, on the host."""
    lengths = batch.lengths or (batch.tokens.shape[1],) * len(batch.tokens)
    repeats = torch.tensor(lengths, device="cpu")
    return torch.arange(len(lengths), device="cpu").repeat_interleave(repeats)
