"""Medusa (Cai et al., 2024): heads on the target's last state, each predicting one token further
ahead.

Shapes: B batch, T tokens, D target width, V draft vocabulary, K heads, R supervised rows, F
frontier nodes. Head k, from 0, at index t predicts token t + 2 + k; token t + 1 is the target's
own.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spectrain.config.values import Below1, Share, Steps, VocabularySize, Width
from spectrain.drafters.layers.heads import MedusaHead
from spectrain.drafters.layers.language_model_loss import language_model_loss
from spectrain.drafters.layers.losses import LossName
from spectrain.drafters.layers.vocabulary import HeadsDrafter, Supervision
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.models.features import Layer
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.host_copies import select_rows
from spectrain.models.lora import TargetTraining
from spectrain.models.target import Target
from spectrain.trees.rollout import DepthRollout, Draft

from .base import Losses, Stage, TrainingState
from .capabilities import Capture, SavedFiles
from .context import Context
from .step_cost import BatchShape, Run, StepCost


class Medusa(HeadsDrafter):
    """Medusa-1 (section 3.2.1) on a frozen target; with `adapt`, Medusa-2 (3.2.2), which trains the
    target with its heads.

    Medusa-1's loss is sum_k head_decay^k L_k, k from 1. Medusa-2 first trains the heads for a share
    `heads_first` of the steps, then both on L_LM + heads_coefficient * schedule * (that sum): the
    heads at trainer.lr, the target at `target_lr_scale` times it. L_LM is the cross-entropy of the
    data or, with self_distillation (3.3.2), KL(original || adapted), where the original target has
    the same weights without the LoRA adapters. The output is then that of the trained target.
    """

    layers: tuple[Layer, ...] = ("final",)
    saved = SavedFiles(shape=("num_heads", "num_layers", "vocab_size", "head_rank"))
    capabilities = replace(HeadsDrafter.capabilities, capture=Capture())

    def __init__(
        self,
        target: Target,
        # Number of heads, which is the number of drafts.
        num_heads: Steps = 3,
        # Number of residual blocks per head.
        num_layers: Steps = 1,
        # Draft vocabulary in tokens; larger values are capped at the target's vocabulary.
        vocab_size: VocabularySize = 32000,
        # Loss of each head: a cross-entropy with the data or a divergence from the target.
        loss: LossName = "cross_entropy",
        # Factor from 0 to 1 between the loss weights of successive heads.
        head_decay: Share = 0.8,
        # How Medusa-2 trains the target: LoRA adapters (lora) or all weights (full); null freezes
        # the target (Medusa-1).
        adapt: Literal["lora", "full"] | None = None,
        # Share of the training steps in which the heads train alone, from 0 to below 1.
        heads_first: Below1 = 0.5,
        # Weight of the heads' loss when the target trains with them.
        heads_coefficient: float = 0.2,
        # Growth of the heads' weight over the second stage: none (constant), linear, or a quarter
        # sine (sine).
        schedule: Literal["constant", "linear", "sine"] = "constant",
        # Whether the target learns from its original distributions instead of the data; this needs
        # adapt=lora.
        self_distillation: bool = False,
        # Learning rate of the target as a multiple of trainer.lr.
        target_lr_scale: float = 0.25,
        # Rank of the LoRA adapters.
        rank: Width = 32,
        # Scale of the LoRA adapters; their output is multiplied by alpha / rank.
        alpha: float = 16.0,
        # Rank of the heads' factorised output layers (SlimSpec); null uses full-rank layers.
        head_rank: Width | None = None,
    ) -> None:
        super().__init__()
        if self_distillation and adapt != "lora":
            raise UserError(
                "drafter.self_distillation: the original target is the one without adapters; use "
                "drafter.adapt=lora"
            )
        self.divergence = loss
        self.head_decay = head_decay
        self.heads_first = heads_first
        self.heads_coefficient = heads_coefficient
        self.schedule = schedule
        self.self_distillation, self.target_lr_scale = self_distillation, target_lr_scale
        self.target_training = None if adapt is None else TargetTraining(adapt, rank, alpha)
        self.capabilities = replace(self.capabilities, target_training=self.target_training)
        self.head = target.head
        vocab_size = min(vocab_size, target.head.vocab_size)
        self.heads = nn.ModuleList(
            MedusaHead(target.width, vocab_size, num_layers, head_rank) for _ in range(num_heads)
        )
        self.add_vocabulary(vocab_size, target.head.vocab_size)

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Start the heads from the target's output layer, and open the target's weights or add
        its adapters.
        """
        super().prepare(target, token_counts)
        if self.target_training is not None:
            self.target_training.start_training(target)

    # Training

    @property
    def stages(self) -> list[Stage]:
        """The heads on stored features, then heads and target, whose features the loss computes."""
        heads: dict[str, Any] = {"params": list(self.parameters())}
        # Head k reads the position 1 + k before its label.
        reach = len(self.heads)
        if self.target_training is None:
            return [Stage([heads], self.layers, final_reach=reach)]
        adapted = {"params": self.target_training.parameters, "lr_scale": self.target_lr_scale}
        return [
            Stage([heads], self.layers, self.heads_first, reach),
            Stage([heads, adapted], (), 1 - self.heads_first),
        ]

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of the heads over supervised tokens and, if the target is trained, of
        its layers over all tokens.
        """
        cost = super().step_cost(target, batch)
        if self.target_training is None:
            return cost
        runs = [*cost.runs, Run(target.layers, batch.tokens, batch.length)]
        original = batch.tokens if self.self_distillation else 0
        return StepCost(
            runs, replace(cost.judged, other_rows=4 * batch.supervised), forward_rows=original
        )

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        """Return the heads' loss and, in the second stage, the target's language model loss."""
        if batch.features is not None:
            return Losses(*self._heads_loss(batch, batch.features.at_layer("final")))
        plan = ForwardPlan(
            layers=("final",), grad=True, recompute=state.recompute, lengths=batch.lengths
        )
        final = target.run(batch.tokens, plan).at_layer("final")
        terms, hits, counts = self._heads_loss(batch, final)
        weight = self.heads_coefficient * self._schedule_factor(state.progress)
        heads = {name: weight * loss for name, loss in terms.items()}
        training = self.target_training
        assert training is not None
        own_loss = language_model_loss(
            select_rows(final, batch.next_is_supervised),
            batch,
            target,
            training,
            self.self_distillation,
        )
        return Losses({"language_model": own_loss, **heads}, hits, counts)

    def _heads_loss(self, batch: Batch, final: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return the losses, hits and counts of all heads on the same states. Gradients flow
        into `final`, not into labels.
        """
        supervision = Supervision(self, batch, final.detach())
        dtype = next(self.parameters()).dtype
        return self.heads_loss(
            supervision,
            lambda k: self.heads[k].head_inputs(
                select_rows(final, supervision.is_supervised(k)).to(dtype)
            ),
        )

    def _schedule_factor(self, progress: float) -> float:
        """Return the schedule's factor, which grows from 0 to 1 over the second stage; constant
        is 1.
        """
        done = (progress - self.heads_first) / (1 - self.heads_first)
        return {"constant": 1.0, "linear": done, "sine": math.sin(math.pi / 2 * done)}[
            self.schedule
        ]

    # Decoding

    def draft(self, context: Context) -> Draft:
        final = context.last_state(context.new_features.at_layer("final")).to(
            next(self.parameters()).dtype
        )
        return Draft(_Heads(self, context.root, final))


class _Heads(DepthRollout):
    """Drafts one round: the prediction of head k depends on the depth only, not on the path."""

    def __init__(self, drafter: Medusa, root: Tensor, final: Tensor) -> None:
        super().__init__(root, len(drafter.heads))
        self.drafter, self.final = drafter, final  # [B, 1, D]
        self.draft_ids = drafter.draft_ids
        self.log_q_by_head: list[Tensor] = []  # log q [B, 1, V] of the heads computed so far

    def log_probs_at(self, depth: Tensor, tokens: Tensor) -> Tensor:
        while len(self.log_q_by_head) <= min(self.max_level, len(self.drafter.heads) - 1):
            self.log_q_by_head.append(
                self.drafter.heads[len(self.log_q_by_head)](self.final).float().log_softmax(-1)
            )
        log_q = torch.cat(self.log_q_by_head, dim=1)
        return log_q.gather(1, depth[..., None].expand(-1, -1, log_q.shape[-1]))
