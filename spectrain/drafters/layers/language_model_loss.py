"""The loss that keeps the quality of a target that is trained with its drafter. Shapes: R
supervised rows, D target width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import HeadTarget
from spectrain.models.host_copies import select_rows
from spectrain.models.lora import TargetTraining
from spectrain.models.target import Target

from .losses import TargetLogProbs, head_loss


def language_model_loss(
    states: Tensor, batch: Batch, target: Target, training: TargetTraining, self_distillation: bool
) -> Tensor:
    """Return the target's own loss, summed over supervised tokens, from its states [R, D] at the
    positions before them.

    It is the cross-entropy of the data or, with `self_distillation`, KL(original || trained).
    """
    tokens = select_rows(batch.tokens.roll(-1, dims=1), batch.next_is_supervised)
    target_log_probs = original_log_probs(batch, target, training) if self_distillation else None
    loss_name = "forward_kl" if self_distillation else "cross_entropy"
    return head_loss(loss_name, states, target.head.projection, tokens, target_log_probs).loss


@torch.no_grad()
def original_log_probs(batch: Batch, target: Target, training: TargetTraining) -> TargetLogProbs:
    """Return the log-probabilities of the target as it was before its training, at the supervised
    positions [R].
    """
    with training.use_original(target) as original:
        features = original.features(batch.tokens, ("final",), batch.lengths)
        final = select_rows(features.at_layer("final"), batch.next_is_supervised)
        return TargetLogProbs(HeadTarget(final, original.head.projection))
