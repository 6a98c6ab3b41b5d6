"""EAGLE-3 that is trained for the expected accepted length of its chains.

Shapes: B batch, T tokens, A = B T chains, K draft steps, R judged drafts, D width, V draft
vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from spectrain.config.values import Count, LayerCount, NotNegative, Share, Steps, VocabularySize
from spectrain.drafters.base import Losses
from spectrain.drafters.capabilities import SavedFiles
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.layers.vocabulary import Supervision
from spectrain.drafters.step_cost import BatchShape, StepCost
from spectrain.kernels.linear_divergence import DivergenceResult, linear_divergence
from spectrain.models.host_copies import select_joined
from spectrain.models.target import Target
from spectrain.models.weight_block import apply_output_layer

from .loss import RecordedRates, expected_length, length_gradient, weighted_loss


class ExpectedLength(Eagle3):
    """EAGLE-3 whose loss is the number of drafts of a chain that rejection sampling is expected to
    reject, instead of a sum over single draft steps.

    Every position starts a chain of `ttt_steps` drafts. Draft k is accepted with the probability
    a_k = sum_v min(p, q), so a chain has 1 + sum_j a_1 .. a_j tokens per round. A late draft counts
    as far as all drafts before it are accepted. The loss of a chain of K supervised drafts is K -
    sum_j a_1 .. a_j, plus `kl` times EAGLE-3's forward KL, because the rates alone hardly change
    where p and q have little in common.

    The gradient by a_k is computed first, without a graph. With it as a constant weight of 1 - a_k,
    one pass through the output layer has the same gradient, and no logits are stored.
    """

    saved = SavedFiles(shape=("vocab_size", "layers", "num_layers", "window", "architecture"))

    def __init__(
        self,
        target: Target,
        # Weight of EAGLE-3's forward KL beside the expected length.
        kl: NotNegative = 0.3,
        # Number of draft steps that are unrolled in training, the length of the chains.
        ttt_steps: Steps = 7,
        # Draft vocabulary in tokens; larger values are capped at the target's vocabulary.
        vocab_size: VocabularySize = 32000,
        # Layers of the target whose hidden states are fused; null uses the family's default layers.
        layers: list[int] | None = None,
        # Number of decoder layers of the drafter.
        num_layers: LayerCount = 1,
        # Number of preceding positions that a token attends to; null attends to all of them.
        window: Count | None = None,
        # Factor from 0 to 1 between the weights of the KL of successive draft steps.
        step_decay: Share = 0.8,
        # Initial values, as those of eagle3.
        start: Literal["target", "random", "fitted"] = "target",
        # Configuration keys and variants of the layers that differ from the target's; null copies
        # the target's.
        architecture: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            target,
            ttt_steps,
            vocab_size,
            layers,
            num_layers,
            window,
            # The target's mass outside the draft vocabulary counts as rejected.
            "total_variation",
            step_decay,
            start,
            architecture=architecture,
        )
        self.kl = kl

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return EAGLE-3's cost with the logits of a first pass, which has no gradient."""
        cost = super().step_cost(target, batch)
        return replace(cost, judged=replace(cost.judged, other_rows=cost.judged.rows))

    def judge_steps(self, supervision: Supervision, states: list[Tensor]) -> Losses:
        """Compute the losses of the states of every step's supervised positions together."""
        if supervision.rows.divergence is not None:
            return super().judge_steps(supervision, states)
        assert supervision.target_log_probs is not None
        label_index, order, step = supervision.join_steps(len(states))
        hidden = select_joined([self.head_inputs(state) for state in states], order)
        labels = supervision.target_log_probs.select_rows(label_index)
        recorded = RecordedRates()
        with torch.no_grad():
            apply_output_layer(
                self.lm_head,
                hidden,
                lambda head, rows: linear_divergence(rows, head, labels, recorded),
            )
        chains = DraftChains(supervision, len(states), order, step)
        row_rates = torch.cat(recorded.chunks) if recorded.chunks else hidden.new_zeros(0)
        rates = chains.arrange_rows(row_rates)
        length_weight = chains.select_rows(length_gradient(rates) * chains.is_judged)
        weights = length_weight, self.kl * self.step_decay**step
        row_weight = supervision.rows.weight
        judged: DivergenceResult = apply_output_layer(
            self.lm_head,
            hidden,
            lambda head, rows: linear_divergence(
                rows,
                head,
                labels,
                weighted_loss,
                None if row_weight is None else row_weight[label_index],
                weights,
            ),
        )
        # The constant makes the value that of the loss; its gradient is 0.
        value = (chains.is_judged.sum(1) - expected_length(rates)).sum()
        constant = value - (length_weight * (1 - row_rates)).sum()
        correct = self.draft_ids[judged.predictions] == supervision.labels[label_index]
        terms = {"expected_length": judged.loss + constant}
        if supervision.draft_term is not None:
            term = supervision.draft_term
            terms[term.name] = term.loss(hidden, self.lm_head, label_index, step)
        return Losses.by_depth(terms, correct, step, self.num_steps)


class DraftChains:
    """The judged drafts of a batch as chains [A, K]: draft k of the chain at index t is that of
    draft step k at t. A chain ends before its first draft without a label.
    """

    def __init__(
        self, supervision: Supervision, num_steps: int, order: Tensor, step: Tensor
    ) -> None:
        is_supervised = torch.stack(
            [supervision.is_supervised(number).flatten() for number in range(num_steps)], dim=1
        )
        self.is_judged = is_supervised.long().cumprod(1)  # [A, K]
        rows = [column.nonzero()[:, 0] for column in is_supervised.unbind(1)]
        self.chain = torch.cat(rows)[order]  # [R] the chain of every judged draft
        self.step = step  # [R]

    def arrange_rows(self, values: Tensor) -> Tensor:
        """Return values [R] of the drafts as [A, K], 0 where a chain has ended."""
        chains = torch.zeros(self.is_judged.shape, dtype=values.dtype, device=values.device)
        chains[self.chain, self.step] = values
        return chains * self.is_judged

    def select_rows(self, chains: Tensor) -> Tensor:
        """Return the values [R] of the drafts from those of chains [A, K]."""
        return chains[self.chain, self.step]
