"""PARD (An et al., 2025): a small causal LM that drafts all its tokens in one forward, through mask
tokens.

Shapes: B batch, T tokens, N packed tokens, K drafts, V vocabulary, R supervised positions, F
frontier nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.config.values import Below1, PositiveShare, Steps
from spectrain.drafters.layers.losses import LossName, head_loss
from spectrain.drafters.layers.mask_blocks import (
    MaskBlocks,
    add_blocks,
    add_embeddings,
    find_prefix_ends,
    init_mask_vectors,
    replace_embeddings,
)
from spectrain.drafters.layers.small_models import SmallModelDrafter
from spectrain.errors import UserError
from spectrain.features.batch import Batch, pad_or_pack
from spectrain.kernels.linear_divergence import HeadTarget, Projection, argmax_and_log_z, split_rows
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.host_copies import chosen_rows, copy_to_device, on_host, select_rows
from spectrain.models.target import Target
from spectrain.randomness import MASKED_PREFIXES, WITHOUT_FEATURES, sequence_generator
from spectrain.trees.rollout import Draft, MarginalRollout

from .base import Losses, TrainingState
from .capabilities import Capabilities, Capture, OnePassCost, SavedFiles
from .context import Context
from .step_cost import BatchShape, Judged, Run, StepCost

FEATURE_SCALE = 0.02  # factor of projected features, which are added to embeddings (PARD-2)


class Pard(SmallModelDrafter):
    """A small LM with one learned mask vector: each of `num_drafts` - 1 masks after the root
    predicts one more token.

    Training runs blocks of masks after prefixes of the data, and also supervises ordinary
    positions. Conditional drop (section 3.2): a share max(keep^b, keep_least) of the prefixes has b
    masks or more. So every mask sees the chain of masks before it, and a forward has at most T (1 +
    sum_b max(keep^b, keep_least)) tokens of a sequence. The labels are the data's tokens, or with a
    divergence as `loss` the target's distributions.

    PARD-2 (AMD, 2026) adds two options. With `confidence`, draft b of a block, from 0, with label
    x_t weighs prod_{s=1..b} p(x_{t-s}), the target's probability of the labels before it. With
    `layers`, features of the target are projected and added to the embeddings, times FEATURE_SCALE:
    a token gets those of the position before it, and all masks those of the root. A share `without`
    of the sequences trains without features.
    """

    saved = SavedFiles(shape=("architecture", "num_layers", "model", "layers"))

    def __init__(
        self,
        target: Target,
        # Number of draft tokens that one forward proposes.
        num_drafts: Steps = 8,
        # Number of the target's layers to copy, evenly spaced with the first and the last; null
        # when model or architecture gives the drafter.
        num_layers: int | None = None,
        # Directory or hub name of a small causal model to start from; null when num_layers or
        # architecture gives the drafter.
        model: str | None = None,
        # Transformers configuration of a new, random model; null when num_layers or model gives the
        # drafter.
        architecture: dict[str, Any] | None = None,
        # Loss of each draft: a cross-entropy with the data or a divergence from the target.
        loss: LossName = "cross_entropy",
        # Factor from 0 to 1 by which the share of trained prefixes falls with each further mask.
        keep: PositiveShare = 0.7,
        # Smallest share of the prefixes that any mask is trained behind.
        keep_least: PositiveShare = 0.2,
        # Whether to weigh a draft's loss by the target's probability of the drafts before it
        # (PARD-2).
        confidence: bool = False,
        # Layers of the target whose features are added to the embeddings (PARD-2); null adds none.
        layers: list[int] | None = None,
        # Share of the sequences that are trained without the target's features.
        without: Below1 = 0.2,
        # Seed of the conditional drop of masks and of the sequences without features.
        seed: int = 0,
    ) -> None:
        super().__init__()
        if num_drafts < 2:
            raise UserError(
                f"drafter.num_drafts={num_drafts}: use 2 or more; drafter=causal drafts one token "
                "at a time"
            )
        self.num_drafts = num_drafts
        self.divergence = loss
        self.seed = seed
        self.keep = keep
        self.keep_least = keep_least
        self.confidence = confidence
        self.without = without
        self.add_model(target, num_layers, model, architecture)
        self.mask = nn.Parameter(torch.zeros(1, self.model.width))
        self.layers = tuple(sorted(set(layers or ())))
        target.check_layers(self.layers)
        wide = len(self.layers) * target.width
        self.features = nn.Linear(wide, self.model.width, bias=False) if wide else None
        self.last: Tensor | None = None  # [B, 1, F] the features of the last committed token
        capture = Capture(state_names=("cache", *(("last",) if wide else ())))
        self.capabilities = Capabilities(
            drafts_from_features=True, capture=capture, cost=OnePassCost
        )

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Start the mask near the mean embedding."""
        with torch.no_grad():
            self.mask.copy_(init_mask_vectors(self.model.head.embedding, 1))

    # Training

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of the model over all tokens and masks, with an attention mask in
        every layer.
        """
        share = sum(max(self.keep**depth, self.keep_least) for depth in range(1, self.num_drafts))
        rows = batch.tokens + share * batch.supervised
        judged_rows = (1 + share) * batch.supervised
        judged = Judged(judged_rows, target.head.vocab_size, judged_rows, copies=1, label_copies=1)
        mask = rows * rows / batch.texts
        return StepCost([Run(self.model.layers, rows, rows / batch.texts, mask=mask)], judged)

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Return the loss of masks and ordinary positions from one forward [B, N]; depth 0 is an
        ordinary position.
        """
        assert batch.features is not None
        blocks = add_blocks(batch, self.prefixes(batch, state.step))
        fused = None if self.features is None else self.trained_features(batch, blocks, state.step)
        with self.insert_embeddings(blocks.mask_index, fused):
            features_out = self.model.run(
                blocks.tokens,
                ForwardPlan(
                    layers=("final",),
                    grad=torch.is_grad_enabled(),
                    recompute=state.recompute,
                    positions=blocks.positions,
                    mask=blocks.visible,
                    lengths=blocks.lengths,
                ),
            )
        # Rows are chosen on the host.
        is_text = on_host(batch.next_is_supervised).gather(1, on_host(blocks.token_index))
        is_judged = on_host(blocks.supervised) | (on_host(blocks.is_batch_token) & is_text)
        labels = select_rows(blocks.labels, is_judged)
        depths = select_rows(blocks.mask_index, is_judged) + 1
        final = batch.features.at_layer("final")
        final = final.gather(1, blocks.token_index[..., None].expand(-1, -1, final.shape[-1]))
        final = select_rows(final, is_judged)
        drafter_head, target_head = self.output_layers
        share = None
        if self.confidence:
            share = select_rows(self.shares(batch, blocks, target_head), is_judged)
        weights = blocks.loss_weights(copy_to_device(is_judged, final.device), batch, share)
        judged = head_loss(
            self.divergence,
            select_rows(features_out.at_layer("final"), is_judged),
            drafter_head,
            labels,
            HeadTarget(final, target_head),
            row_weight=weights,
        )
        best = (
            argmax_and_log_z(final, target_head)[0]
            if self.divergence == "cross_entropy"
            else judged.labels
        )
        return Losses.by_depth(
            {self.divergence: judged.loss}, judged.predictions == best, depths, self.num_drafts
        )

    @torch.no_grad()
    def shares(self, batch: Batch, blocks: MaskBlocks, head: Projection) -> Tensor:
        """Return the weight [B, N] of each draft: the product of p over the labels of the drafts
        before it in its block.
        """
        assert batch.features is not None
        predicts = batch.next_is_supervised
        log_probs = HeadTarget(select_rows(batch.features.at_layer("final"), predicts), head)
        labels = select_rows(batch.tokens.roll(-1, dims=1), predicts)
        parts = [
            log_probs(rows).gather(-1, labels[rows, None])[:, 0] for rows in split_rows(len(labels))
        ]
        # [B, T] of the next token
        log_p = torch.zeros(predicts.numel(), dtype=torch.float64, device=predicts.device)
        log_p = log_p.index_copy(
            0,
            chosen_rows(predicts, predicts.device),
            torch.cat([*parts, log_p.new_zeros(0)]).double(),
        ).view(predicts.shape)
        # [B, T + 1] summed over all tokens up to each position
        before = F.pad(log_p.cumsum(1), (1, 0))
        return (
            (before.gather(1, blocks.token_index) - before.gather(1, blocks.prefix_end_index))
            .exp()
            .float()
        )

    def trained_features(self, batch: Batch, blocks: MaskBlocks, step: int) -> Tensor:
        """Return the features [B, N, F] that are added at every position: those of the token before
        it, and at a mask those of the token before its block's root.

        They are 0 at a text's first token, and in the random share of sequences that trains without
        features.
        """
        assert batch.features is not None
        rows = []
        for tokens, _ in batch.split_documents():
            source = sequence_generator(WITHOUT_FEATURES, self.seed, tokens, step)
            has_features = torch.full(
                (len(tokens),),
                float(torch.rand((), generator=source, device="cpu") >= self.without),
            )
            has_features[0] = 0
            rows.append(has_features)
        fused = F.pad(batch.features.fuse_layers(self.layers), (0, 0, 1, 0))[:, :-1]
        fused = fused * pad_or_pack(rows, batch.lengths is not None)[..., None].to(fused)
        return fused.gather(1, blocks.prefix_end_index[..., None].expand(-1, -1, fused.shape[-1]))

    @contextmanager
    def insert_embeddings(self, mask_index: Tensor, fused: Tensor | None) -> Iterator[None]:
        """Put the mask vector where `mask_index` [B, N] is not negative; add projected features
        [B, N, F] everywhere.
        """
        with ExitStack() as stack:
            stack.enter_context(
                replace_embeddings(self.model.head.embedding, self.mask, mask_index)
            )
            if self.features is not None and fused is not None:
                added = FEATURE_SCALE * self.features(fused.to(self.features.weight.dtype))
                stack.enter_context(add_embeddings(self.model.head.embedding, added))
            yield

    def prefixes(self, batch: Batch, step: int) -> list[list[tuple[int, int]]]:
        """Return every prefix with a label for one of its masks, and its number of masks after
        the conditional drop.
        """
        rows = []
        for tokens, mask in batch.split_documents():
            ends = find_prefix_ends(mask, self.num_drafts - 1)
            source = sequence_generator(MASKED_PREFIXES, self.seed, tokens, step)
            rank = torch.randperm(len(ends), generator=source, device="cpu")
            prefix_counts = [
                max(self.keep**depth, self.keep_least) * len(ends)
                for depth in range(1, self.num_drafts)
            ]
            sizes = sum(
                ((rank < count).long() for count in prefix_counts), start=torch.zeros_like(rank)
            )
            rows.append([(end, size) for end, size in zip(ends.tolist(), sizes.tolist()) if size])
        return rows

    # Decoding

    def draft(self, context: Context) -> Draft:
        """Run the tokens that the model has not read, the root and the masks in one forward."""
        device = context.tokens.device
        cache, num_unread = self.open_cache(context, 1 + self.num_drafts)
        width = context.new_features.tokens.shape[1] + self.num_drafts
        offsets = torch.arange(width, device=device)
        mask_index = offsets - num_unread[:, None] - 1
        mask_index = torch.where(mask_index < self.num_drafts - 1, mask_index.clamp(min=-1), -1)
        index = (cache.lengths[:, None] + offsets).clamp(max=context.tokens.shape[1] - 1)
        tokens = torch.where(offsets <= num_unread[:, None], context.tokens.gather(1, index), 0)
        with self.insert_embeddings(
            mask_index, self.decoding_features(context, num_unread, offsets)
        ):
            states = self.run_tokens(tokens, ForwardPlan(layers=("final",), cache=cache))
        cache.commit(None, num_unread)
        is_judged = num_unread[:, None] + torch.arange(self.num_drafts, device=device)
        final = states.gather(1, is_judged[..., None].expand(-1, -1, self.model.width))
        return Draft(MarginalRollout(context.root, self.log_q(final)))

    def decoding_features(
        self, context: Context, num_unread: Tensor, offsets: Tensor
    ) -> Tensor | None:
        """Return the features [B, W, F] of the unread tokens, of the root after `num_unread` [B]
        of them, and of the masks.
        """
        if self.features is None:
            return None
        fused = context.new_features.fuse_layers(self.layers)
        if context.round == 0 or self.last is None:
            self.last = torch.zeros_like(fused[:, :1])
        shifted = torch.cat([self.last, fused], dim=1)
        index = torch.minimum(offsets, num_unread[:, None])[..., None].expand(
            -1, -1, fused.shape[-1]
        )
        self.last = shifted.gather(1, num_unread[:, None, None].expand(-1, 1, fused.shape[-1]))
        return shifted.gather(1, index)
