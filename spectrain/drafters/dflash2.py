"""DFlash2 (z-lab, 2026): DFlash with convolutions inside the block and a candidate selector that
reads the previous token.

Shapes: A anchors, S slots, K drafts of a block, W width, G groups of channels, C candidates, V
draft vocabulary, R judged drafts, F frontier nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spectrain.config.values import Count, NotNegative, Width
from spectrain.drafters.layers.block_drafter import (
    BlockAttentionFn,
    BlockConfig,
    BlockDrafter,
    BlockLayer,
    Rope,
)
from spectrain.drafters.layers.candidates import CandidateRollout, candidate_logits
from spectrain.drafters.layers.judged_drafts import JudgedDrafts, SlotStates
from spectrain.drafters.layers.losses import LossName
from spectrain.errors import UserError
from spectrain.kernels.linear_divergence import split_rows
from spectrain.models.target import Target
from spectrain.trees.rollout import Rollout, gather_by_depth

from .base import Losses
from .context import Context
from .step_cost import BatchShape, StepCost


class BlockConvolution(nn.Module):
    """Two dynamic, grouped, causal convolutions inside a block, before and after a sublayer.

    y_t = sum_tap (base[tap] + delta_t[tap]) x_{t - tap}, where delta is a projection of the
    sublayer's normed input, one number for each group of channels.
    """

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.group = taps, group
        # per row: kernels, shifted inputs and sums of both convolutions
        self.stored_values = 2 * (2 * taps + 1) * width
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * width // group, bias=False)
        # Start as the identity.
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def dynamic_kernels(self, normed: Tensor) -> Tensor:
        """Compute the dynamic kernels of the sublayer's input and output, [A, S, W] -> [A, S, 2,
        taps, G].
        """
        return self.kernel_projection(normed).unflatten(-1, (2, self.taps, -1))

    def convolve(self, x: Tensor, delta: Tensor, side: int) -> Tensor:
        """Convolve [A, S, W], the sublayer's input (side 0) or its output (side 1)."""
        # [A, S, taps, W]
        kernels = self.base_kernel[side] + delta[:, :, side].repeat_interleave(self.group, dim=-1)
        shifted = [x, *(F.pad(x, (0, 0, tap, 0))[:, : x.shape[1]] for tap in range(1, self.taps))]
        return (torch.stack(shifted, dim=2) * kernels).sum(2)


class ConvolvedLayer(BlockLayer):
    """A block layer with convolutions around its attention and its feed-forward part."""

    def __init__(self, config: Any, taps: int, group: int) -> None:
        super().__init__(config)
        self.attention_conv = BlockConvolution(config.hidden_size, taps, group)
        self.mlp_conv = BlockConvolution(config.hidden_size, taps, group)

    def forward(
        self, x: Tensor, rope: Rope, context: Tensor, context_rope: Rope, attend: BlockAttentionFn
    ) -> Tensor:
        context_kv = self.self_attn.project_kv(context, context_rope)
        normed = self.input_layernorm(x)
        around = self.attention_conv
        delta = around.dynamic_kernels(normed)
        projected = self.self_attn.project_qkv(around.convolve(normed, delta, 0), rope)
        x = x + around.convolve(
            self.self_attn.project_output(attend(*projected, context_kv)), delta, 1
        )
        normed = self.post_attention_layernorm(x)
        around = self.mlp_conv
        delta = around.dynamic_kernels(normed)
        return x + around.convolve(self.mlp(around.convolve(normed, delta, 0)), delta, 1)


class CandidateSelector(nn.Module):
    """Scores a candidate by the previous token: sum_r pred[previous, r] (W h)_r succ[candidate,
    r].
    """

    def __init__(self, vocab_size: int, width: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, rank) * 0.02)
        self.successor_codebook = nn.Parameter(torch.randn(vocab_size, rank) * 0.02)
        self.hidden_projection = nn.Linear(width, rank, bias=False)
        nn.init.normal_(self.hidden_projection.weight, std=0.02)

    def forward(self, hidden: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """Return scores [.., C] from states [.., W], previous tokens [..] and candidates [..,
        C], in target ids.
        """
        query = F.embedding(before, self.predecessor_codebook) * self.hidden_projection(hidden)
        return (F.embedding(candidates, self.successor_codebook) @ query[..., None])[..., 0]


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(BlockConfig):
    """Settings of DFlash2."""

    # Number of slots that a convolution covers: a slot and those before it.
    conv_kernel_size: Count = 2
    # Number of channels that share a dynamic kernel; it must divide the target's width.
    conv_group_size: Count = 16
    # Rank of the candidate selector's codebooks.
    selector_rank: Width = 256
    # Number of candidate tokens that the selector ranks per slot.
    selector_top_k: Count = 16
    # Weight of the candidate selector's loss.
    selector_weight: NotNegative = 1.0
    # Loss of each draft token: a cross-entropy or a divergence from the target.
    loss: LossName = "forward_kl"


class DFlash2(BlockDrafter):
    """Drafts from the `selector_top_k` most likely tokens of each slot, which a selector ranks by
    the previous token.

    The loss is DFlash's plus `selector_weight` times the cross-entropy of the target's most likely
    token among the slot's candidates; a label that is no candidate replaces the last one. Other
    tokens are never drafted.
    """

    saved = replace(
        BlockDrafter.saved,
        shape=(*BlockDrafter.saved.shape, "conv_kernel_size", "conv_group_size", "selector_rank"),
    )

    def __init__(self, target: Target, config: DFlash2Config) -> None:
        group = config.conv_group_size
        if target.width % group:
            raise UserError(
                f"drafter.conv_group_size={group}: use a divisor of the target's width, "
                f"{target.width}"
            )
        super().__init__(
            target, config, partial(ConvolvedLayer, taps=config.conv_kernel_size, group=group)
        )
        self.divergence = config.loss
        self.selector_weight = config.selector_weight
        self.selector_top_k = min(config.selector_top_k, len(self.d2t))
        self.candidate_selector = CandidateSelector(
            target.head.vocab_size, target.width, config.selector_rank
        )

    # Training

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return DFlash's cost with codebook and output rows of every candidate, which only the
        backward pass stores.
        """
        cost = super().step_cost(target, batch)
        width = target.width + self.candidate_selector.hidden_projection.out_features
        judged = replace(cost.judged, other_rows=2 * cost.judged.rows)
        return replace(
            cost, judged=judged, backward_values=2 * cost.judged.rows * self.selector_top_k * width
        )

    def judge_drafts(self, drafts: JudgedDrafts) -> Losses:
        """Return the loss of the output layer and that of the selector, in chunks of rows."""
        weights = drafts.decayed_weights(self.decay)
        supervision = drafts.supervision
        judged = drafts.judge(self.projection, weights)
        before = drafts.select_judged(drafts.previous_tokens)
        labels = supervision.label_ids[drafts.label_index]
        weights = weights * self.t2d[supervision.labels[drafts.label_index]]
        selector_losses = []
        selected = []
        # Without rows, the selector still needs gradients, because other processes wait for them.
        for rows in [*split_rows(len(labels))] or [slice(0, 0)]:
            part = (tensor[rows] for tensor in (drafts.hidden, before, labels, weights))
            loss, tokens = checkpoint(self._select_candidates, *part, use_reentrant=False)
            selector_losses.append(loss)
            selected.append(tokens)
        terms = {
            self.divergence: judged.loss,
            "selector": self.selector_weight * torch.stack(selector_losses).sum(),
        }
        return drafts.sum_losses(terms, torch.cat(selected))

    def _select_candidates(
        self, hidden: Tensor, before: Tensor, labels: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the selector's loss over rows [r], and the draft ids [r] of the candidates that
        it ranks first.
        """
        with torch.no_grad():
            candidates = self.compute_products(hidden).topk(self.selector_top_k, dim=-1).indices
        scores = self._score_candidates(hidden, before, candidates)
        selected = candidates.gather(-1, scores.argmax(-1, keepdim=True))[:, 0]
        missing = (candidates != labels[:, None]).all(-1)
        candidates_and_label = torch.cat(
            [candidates[:, :-1], torch.where(missing, labels, candidates[:, -1])[:, None]], dim=-1
        )
        label_index = (candidates_and_label == labels[:, None]).long().argmax(-1)
        loss = F.cross_entropy(
            self._score_candidates(hidden, before, candidates_and_label),
            label_index,
            reduction="none",
        )
        return (loss * weights).sum(), selected

    def _score_candidates(self, hidden: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """Return scores [r, C] of candidates in draft ids: the output layer's logits plus the
        selector's term.
        """
        logits = candidate_logits(self.projection, hidden, candidates)
        return logits + self.candidate_selector(hidden, before, self.draft_ids[candidates])

    # Decoding

    def make_rollout(self, context: Context, slots: SlotStates) -> Rollout:
        return _Selected(self, context.root, slots.draft_states)


class _Selected(CandidateRollout):
    """Drafts one round: a node's children are its slot's candidates, ranked by its own token."""

    def __init__(self, drafter: DFlash2, root: Tensor, states: Tensor) -> None:
        logits = drafter.head.scale_and_cap(drafter.compute_products(states))  # [B, K, V]
        self.unary, candidates = logits.topk(drafter.selector_top_k, dim=-1)  # [B, K, C]
        super().__init__(root, candidates, drafter.draft_ids)
        self.drafter, self.states = drafter, states  # [B, K, W]

    def score_candidates(self, depth: Tensor, tokens: Tensor) -> Tensor:
        candidates = self.ids[gather_by_depth(self.candidates, depth)]
        terms = self.drafter.candidate_selector(
            gather_by_depth(self.states, depth), tokens, candidates
        )
        return gather_by_depth(self.unary, depth) + terms.float()
