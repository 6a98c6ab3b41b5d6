"""A small model aligned to the target's K most likely tokens, for drafts of beams (AtSpeed, Lin et
al., 2024).

Shapes: B batch, T tokens, R supervised rows, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from spectrain.config.values import Count, Share
from spectrain.drafters.base import Losses, TrainingState
from spectrain.drafters.causal import Causal
from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import HeadTarget, linear_divergence
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target


def alignment_loss(log_p: Tensor, log_q: Tensor, count: int) -> Tensor:
    """Return AtSpeed-S's loss [R] of log-probabilities [R, V]: KL(q' || p') - log of q's mass on
    the target's `count` most likely tokens, with q' and p' the distributions within them.

    The first part orders them as the target does; the second one (density regularization) lets no
    other token take their place among the drafts.
    """
    top = log_p.topk(min(count, log_p.shape[-1]), dim=-1)
    drafted = log_q.gather(-1, top.indices)
    mass = drafted.logsumexp(-1)
    within_q = drafted - mass[:, None]
    within_p = top.values.log_softmax(-1)
    return (within_q.exp() * (within_q - within_p)).sum(-1) - mass


class AtSpeed(Causal):
    """A small model that drafts for beam search. A step of strict beam search is accepted only if
    all K best continuations are drafted, so the loss is about the K most likely tokens of every
    position:

        L = (1 - data_weight) (KL(q' || p') - log sum over the K tokens of q) + data_weight (-log
        q(next token))

    The last term is the cross-entropy of the data, which the authors call the recommendation loss.
    AtSpeed-R, their loss for drawn beams, is drafter=causal drafter.loss=total_variation.
    """

    def __init__(
        self,
        target: Target,
        # Number of the target's layers to copy, evenly spaced with the first and the last; null
        # when model or architecture gives the drafter.
        num_layers: int | None = None,
        # Directory or hub name of a small causal model to start from; null when num_layers or
        # architecture gives the drafter.
        model: str | None = None,
        # Transformers configuration of a new, random model; null when num_layers or model gives the
        # drafter.
        architecture: dict[str, Any] | None = None,
        # Number of the target's most likely tokens that the drafter is aligned to.
        top_k: Count = 10,
        # Weight of the cross-entropy of the data; the alignment has the rest.
        data_weight: Share = 0.2,
    ) -> None:
        super().__init__(target, num_layers, model, architecture)
        self.top_k, self.data_weight = top_k, data_weight

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Return both losses at the supervised positions [R]."""
        assert batch.features is not None
        predicts = batch.next_is_supervised
        plan = ForwardPlan(("final",), grad=torch.is_grad_enabled(), recompute=state.recompute)
        features = self.model.run(batch.tokens, batch.plan_forward(plan))
        states = features.at_layer("final")[predicts]
        weight = batch.row_loss(predicts).weight
        next_tokens = batch.tokens.roll(-1, dims=1)[predicts]
        head, target_head = (
            part.projection.select_entries(slice(self.vocab_size))
            for part in (self.model.head, self.head)
        )
        log_probs = HeadTarget(batch.features.at_layer("final")[predicts], target_head)
        aligned = linear_divergence(
            states, head, log_probs, partial(alignment_loss, count=self.top_k), weight
        )
        data = linear_divergence(states, head, next_tokens, None, weight)
        terms = {
            "alignment": (1 - self.data_weight) * aligned.loss,
            "data": self.data_weight * data.loss,
        }
        hits = (aligned.predictions == aligned.labels).sum()[None].float()
        return Losses(terms, hits, torch.full_like(hits, len(next_tokens)))
