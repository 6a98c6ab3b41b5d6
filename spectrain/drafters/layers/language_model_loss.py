"""The loss that keeps the quality of a target that is trained with its drafter. Shapes: R
supervised rows, D target width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectrain.features.batch import Batch
from spectrain.kernels.linear_divergence import HeadTarget
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
    predicts = batch.next_is_supervised
    target_log_probs = None
    tokens = batch.tokens.roll(-1, dims=1)[predicts]
    if self_distillation:
        with torch.no_grad(), training.use_original(target) as original:
            final = original.features(batch.tokens, ("final",), batch.lengths).at_layer("final")[
                predicts
            ]
            target_log_probs = TargetLogProbs(HeadTarget(final, original.head.projection))
    loss_name = "forward_kl" if self_distillation else "cross_entropy"
    return head_loss(loss_name, states, target.head.projection, tokens, target_log_probs).loss
