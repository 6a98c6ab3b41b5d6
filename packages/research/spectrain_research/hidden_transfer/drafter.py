"""Hidden Transfer and Speculative Streaming: masks whose states are made inside the frozen target.

Shapes: B batch, K masks, D target width.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from spectrain.config.values import Count, NotNegative, Positive, Seed, Steps, Width
from spectrain.drafters.capabilities import SavedFiles
from spectrain.drafters.context import Context
from spectrain.models.features import Features
from spectrain.models.forward_plan import ForwardPlan, LayerSpan
from spectrain.models.partial_forward import PartialForward
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import TokenTree
from spectrain_research.shared.gated_masks import GatedMasks, MaskConfig
from spectrain_research.shared.masks_in_trained_target import JointTraining, MasksInTrainedTarget
from spectrain_research.shared.tree_masks import mask_rows

from .transfer import StateTransfer, resolve_transfer_layer, transfer_states


@dataclass(frozen=True, kw_only=True)
class TransferConfig(MaskConfig):
    """Settings of masks with transferred states."""

    # Layer of the target at which the masks' states are created; null uses the middle layer.
    transfer_layer: Count | None = None


class TransferDrafter(GatedMasks):
    """Masks without an embedding: `transfer` computes their states at `transfer_layer` from the
    newest token's state there.

    In verification the earlier layers run without the masks, so early pruning up to
    `transfer_layer` precedes them, as in Speculative Streaming (section 3.1.3). In training and at
    the end of the prompts they run at the masks without effect. LoRA is in the later layers.
    """

    saved = SavedFiles(shape=("num_masks", "rank", "alpha", "sampler", "transfer_layer"))
    transfer: StateTransfer
    has_stream_vectors: bool

    def __init__(self, target: Target, config: TransferConfig) -> None:
        self.transfer_layer = resolve_transfer_layer(target, config.transfer_layer)
        super().__init__(target, config, self.transfer_layer)
        self.capabilities = replace(self.capabilities, adapts_layers=True)

    def add_inputs(self, target: Target) -> None:
        self.transfer = StateTransfer(target.width, self.num_masks, self.has_stream_vectors)

    def insert_inputs(
        self, target: Target, mask_index: Tensor, rows: Tensor, hosts: Tensor | None
    ) -> AbstractContextManager[None]:
        if hosts is None or not len(rows):
            return nullcontext()
        return transfer_states(target, self.transfer_layer, self.transfer, mask_index, hosts, rows)

    def draft(self, context: Context) -> Draft:
        return replace(super().draft(context), mask_layer=self.transfer_layer)

    def run_tree(self, context: Context, tree: TokenTree, num_masks: int) -> Features:
        assert self.mask_index is not None and self.hosts is not None
        partial = context.partial or PartialForward(
            context.target, context.cache, self.transfer_layer
        )
        partial.run_to_layer(without_masks(tree, num_masks), self.transfer_layer)
        assert partial.hidden is not None
        hidden = partial.hidden[:, :, -1]  # [B, N - M, D]
        hosts = self.hosts.repeat_interleave(self.masks_per_host, dim=1)[..., None].expand(
            -1, -1, hidden.shape[-1]
        )
        states = self.transfer(
            hidden.gather(1, hosts).flatten(0, 1), self.mask_index[:, -num_masks:].flatten()
        )
        hidden = torch.cat([hidden, states.view(len(hidden), num_masks, -1)], dim=1)
        span = LayerSpan(first=self.transfer_layer, hidden=hidden)
        plan = ForwardPlan(
            ("final",),
            positions=context.positions(tree),
            mask=tree.ancestors,
            cache=context.cache,
            span=span,
        )
        with self.insert_masks(context.target, self.mask_index, mask_rows(tree, num_masks)):
            return context.target.run(tree.tokens, plan)


def without_masks(tree: TokenTree, num_masks: int) -> TokenTree:
    """Return the tree without its last `num_masks` nodes, which are masks."""
    tokens, parents, valid, can_emit = (
        part[:, :-num_masks] for part in (tree.tokens, tree.parents, tree.valid, tree.can_emit)
    )
    return TokenTree(
        tokens,
        parents,
        valid,
        can_emit,
        tree.children,
        height=tree.height,
        max_children=tree.max_children,
    )


class HiddenTransfer(TransferDrafter):
    """Hidden Transfer (Wu et al., 2024, arXiv 2404.12022): a map for each mask."""

    has_stream_vectors = False


class SpeculativeStreaming(TransferDrafter):
    """Speculative Streaming (Bhendawade et al., 2024, arXiv 2402.11131), whose target stays frozen
    here: one map for all streams, and a vector for each."""

    has_stream_vectors = True


class FineTunedStreaming(MasksInTrainedTarget, SpeculativeStreaming):
    """Speculative Streaming as the paper fine-tunes: the target learns the task and its streams in
    one training (section 3.1, equation 3).

    The loss is the cross-entropy of the next token, on ordinary tokens, + `streams_weight` times
    that of the tokens that streams predict. LoRA, or all weights, of the target serve both; streams
    have no LoRA of their own. The output is that of the fine-tuned target, token by token.
    """

    saved = SavedFiles(shape=("num_masks", "transfer_layer"))

    def __init__(
        self,
        target: Target,
        # Number of streams, which is the number of drafts.
        num_masks: Steps = 3,
        # Layer of the target at which the streams begin; null uses the middle layer.
        transfer_layer: Count | None = None,
        # How the target is trained: LoRA adapters in all its linears (lora), or all weights (full).
        adapt: Literal["lora", "full"] = "lora",
        # Rank of the LoRA adapters; their output is multiplied by 2, as alpha is twice the rank.
        adapter_rank: Width = 16,
        # Weight of the streams' loss relative to the target's own.
        streams_weight: NotNegative = 1.0,
        # Learning rate of the target as a multiple of trainer.lr.
        target_lr_scale: Positive = 0.25,
        # Seed of the prefixes that streams follow in training.
        seed: Seed = 0,
    ) -> None:
        self.train_with_target(
            JointTraining(adapt, adapter_rank, 2.0 * adapter_rank, streams_weight, target_lr_scale)
        )
        super().__init__(
            target,
            TransferConfig(
                num_masks=num_masks,
                transfer_layer=transfer_layer,
                rank=0,
                sampler=False,
                consistency=0.0,
                seed=seed,
            ),
        )
