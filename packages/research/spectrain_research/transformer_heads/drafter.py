"""Heads that are transformer layers over the target's states (Gloeckle et al., 2024, arXiv
2404.19737).

Shapes: B batch, T tokens, D target width, V draft vocabulary, K heads.
Head k, from 0, at index t reads the target's states up to t and predicts token t + 2 + k; token t +
1 is the target's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from spectrain.config.values import NotNegative, Positive, Share, Steps, VocabularySize, Width
from spectrain.drafters.base import Losses, Stage, TrainingState
from spectrain.drafters.capabilities import Capture, OnePassCost, SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.language_model_loss import language_model_loss
from spectrain.drafters.layers.losses import LossName
from spectrain.drafters.layers.output_layer import make_output_layer, project_down
from spectrain.drafters.layers.vocabulary import Supervision, judge_rows
from spectrain.drafters.step_cost import BatchShape, Run, StepCost
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.models.features import Layer
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.host_copies import select_rows
from spectrain.models.kv_cache import TreeCache
from spectrain.models.lora import TargetTraining
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft, MarginalRollout
from spectrain_research.shared.head_layers import PrefixAttention, SharedHeadDrafter


class TransformerHeads(SharedHeadDrafter):
    """One causal decoder layer per draft, all over the same trunk and with one output layer
    (section 2).

    The trunk is the target's last state h_t. A frozen target has the loss sum_k head_decay^k L_k;
    with `adapt` the target is trained together with the heads, as the authors do, on L_LM +
    heads_weight * (that sum). The output is then that of the trained target.

        p_k = softmax(W f_k(h_1 .. h_t)[t])
    """

    layers: tuple[Layer, ...] = ("final",)
    saved = SavedFiles(shape=("num_heads", "vocab_size", "head_rank"))
    capabilities = replace(
        SharedHeadDrafter.capabilities, capture=Capture(state_names=("cache",)), cost=OnePassCost
    )

    def __init__(
        self,
        target: Target,
        # Number of heads, which is the number of drafts.
        num_heads: Steps = 3,
        # Draft vocabulary in tokens; larger values are capped at the target's vocabulary.
        vocab_size: VocabularySize = 32000,
        # Loss of each head: a cross-entropy with the data or a divergence from the target.
        loss: LossName = "forward_kl",
        # Factor from 0 to 1 between the loss weights of successive heads.
        head_decay: Share = 0.8,
        # Rank of the factorised output layer (SlimSpec); null uses a full-rank layer.
        head_rank: Width | None = None,
        # How the target is trained with its heads: LoRA adapters (lora) or all weights (full); null
        # freezes the target.
        adapt: Literal["lora", "full"] | None = None,
        # Weight of the heads' loss relative to the target's own, with a target that is trained.
        heads_weight: NotNegative = 1.0,
        # Learning rate of the target as a multiple of trainer.lr.
        target_lr_scale: Positive = 0.1,
        # Rank of the LoRA adapters, used with adapt=lora.
        rank: Width = 16,
        # Scale of the LoRA adapters; their output is multiplied by alpha / rank.
        alpha: Positive = 16.0,
    ) -> None:
        super().__init__()
        if num_heads < 1:
            raise UserError(f"drafter.num_heads={num_heads}: use 1 or more")
        self.divergence = loss
        self.head_decay = head_decay
        self.head = target.head
        vocab_size = min(vocab_size, target.head.vocab_size)
        self.heads = nn.ModuleList(PrefixAttention(target) for _ in range(num_heads))
        self.lm_down, self.lm_head = make_output_layer(target.width, vocab_size, head_rank)
        self.add_vocabulary(vocab_size, target.head.vocab_size)
        self.heads_weight, self.target_lr_scale = heads_weight, target_lr_scale
        self.target_training = None if adapt is None else TargetTraining(adapt, rank, alpha)
        self.capabilities = replace(self.capabilities, target_training=self.target_training)
        self.cache: TreeCache | None = None

    def prepare(self, target: Target, token_counts: Tensor) -> None:
        """Start the output layer from the target's, and make the target's weights trainable, or
        add its adapters.
        """
        super().prepare(target, token_counts)
        if self.target_training is not None:
            self.target_training.start_training(target)

    @property
    def stages(self) -> list[Stage]:
        """The heads on stored features, or together with the target, whose features the loss
        computes.
        """
        if self.target_training is None:
            return [Stage.single(self, self.layers)]
        adapted = {"params": self.target_training.parameters, "lr_scale": self.target_lr_scale}
        return [Stage([{"params": list(self.parameters())}, adapted], ())]

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of every head's layer over all tokens, and of the logits of all heads."""
        judged = judge_rows(self, batch, len(self.heads) * batch.supervised)
        runs = [Run(self, batch.tokens, batch.length)]
        if self.target_training is None:
            return StepCost(runs, judged)
        runs.append(Run(target.layers, batch.tokens, batch.length))
        return StepCost(runs, replace(judged, other_rows=2 * batch.supervised))

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        if self.target_training is None:
            assert batch.features is not None
            return self._heads_loss(batch, batch.features.at_layer("final"), state)
        plan = ForwardPlan(
            layers=("final",),
            grad=torch.is_grad_enabled(),
            recompute=state.recompute,
            lengths=batch.lengths,
        )
        final = target.run(batch.tokens, plan).at_layer("final")
        heads = self._heads_loss(batch, final, state)
        own_loss = language_model_loss(
            select_rows(final, batch.next_is_supervised),
            batch,
            target,
            self.target_training,
            False,
        )
        terms = {name: self.heads_weight * loss for name, loss in heads.terms.items()}
        return replace(heads, terms={"language_model": own_loss, **terms})

    def _heads_loss(self, batch: Batch, final: Tensor, state: TrainingState) -> Losses:
        """Return the losses of all heads on the target's states [B, T, D]. Gradients flow into
        these, not into labels.
        """
        supervision = Supervision(self, batch, final.detach())
        states = []
        final = final.to(self.lm_head.weight.dtype)
        for number, head in enumerate(self.heads):
            hidden = state.run_checkpointed(head, final, batch.positions, None, batch.lengths)
            own = select_rows(hidden, supervision.is_supervised(number))
            states.append(project_down(self.lm_down, own))
        return supervision.judge_steps(states, self.lm_head, self.head_decay, len(self.heads))

    def draft(self, context: Context) -> Draft:
        """Read the states of the tokens accepted last; all heads then predict from the last
        state.
        """
        self.cache = context.drafting_cache(self.cache, len(self.heads), 0)
        final = context.new_features.at_layer("final").to(self.lm_head.weight.dtype)
        slots = self.cache.next_slots(final.shape[1])
        states = [
            context.last_state(head(final, slots, self.cache, None, number))
            for number, head in enumerate(self.heads)
        ]
        self.cache.add_uncommitted(final.shape[1])
        self.cache.commit(None, context.num_new)
        logits = self.lm_head(project_down(self.lm_down, torch.cat(states, dim=1)))
        return Draft(MarginalRollout(context.root, logits.float().log_softmax(-1), self.draft_ids))
