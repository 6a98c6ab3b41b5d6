"""Heads that are transformer layers over the target's states (Gloeckle et al., 2024, arXiv 2404.19737).

Shapes: B batch, T tokens, D target width, V draft vocabulary, K heads.
Head k, from 0, at index t reads the target's states up to t and predicts token t + 2 + k; token t + 1 is the target's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from spectrain.config.values import Count, Share, Steps, VocabularySize
from spectrain.drafters.base import Losses, TrainingState
from spectrain.drafters.capabilities import Capture, OnePassCost, SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.layers.losses import LossName
from spectrain.drafters.layers.output_layer import make_output_layer, project_down
from spectrain.drafters.layers.vocabulary import Supervision
from spectrain.errors import UserError
from spectrain.experimental.shared.head_layers import PrefixAttention, SharedHeadDrafter
from spectrain.features.batch import Batch
from spectrain.models.features import Layer
from spectrain.models.kv_cache import TreeCache
from spectrain.models.step_cost import BatchShape, Run, StepCost
from spectrain.trees.base import Draft, MarginalRollout

if TYPE_CHECKING:
    from spectrain.models.target import Target


class TransformerHeads(SharedHeadDrafter):
    """One causal decoder layer per draft, all over the same trunk and with one output layer (section 2).

    The trunk is the frozen target's last state; the authors train it together with the heads. The loss is
    sum_k head_decay^k L_k.

        p_k = softmax(W f_k(h_1 .. h_t)[t])
    """

    layers: tuple[Layer, ...] = ("final",)
    saved = SavedFiles(shape=("num_heads", "vocab_size", "head_rank"))
    capabilities = replace(SharedHeadDrafter.capabilities, capture=Capture(state_names=("cache",)))
    _cost_type = OnePassCost

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
        head_rank: Count | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1:
            raise UserError(f"drafter.num_heads={num_heads}: use 1 or more")
        self.divergence, self.head_decay, self.head = loss, head_decay, target.head
        vocab_size = min(vocab_size, target.head.vocab_size)
        self.heads = nn.ModuleList(PrefixAttention(target) for _ in range(num_heads))
        self.lm_down, self.lm_head = make_output_layer(target.width, vocab_size, head_rank)
        self.add_vocabulary(vocab_size, target.head.vocab_size)
        self.cache: TreeCache | None = None

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return the cost of every head's layer over all tokens, and of the logits of all heads."""
        heads = Run(self, batch.tokens, batch.length)
        return StepCost([heads], self.judged_rows(batch, len(self.heads) * batch.supervised))

    def loss(self, batch: Batch, target: Target, state: TrainingState) -> Losses:
        assert batch.features is not None
        supervision, states = Supervision(self, batch), []
        final = batch.features.at_layer("final").to(self.lm_head.weight.dtype)
        for number, head in enumerate(self.heads):
            hidden = state.run_checkpointed(head, final, batch.positions, None, batch.lengths)
            states.append(project_down(self.lm_down, hidden[supervision.is_supervised(number)]))
        return supervision.judge_steps(states, self.lm_head, self.head_decay, len(self.heads))

    def draft(self, context: Context) -> Draft:
        """Read the states of the tokens accepted last; all heads then predict from the last state."""
        self.cache = context.drafting_cache(self.cache, len(self.heads), 0)
        final = context.new_features.at_layer("final").to(self.lm_head.weight.dtype)
        slots = self.cache.next_slots(final.shape[1])
        states = [context.last_state(head(final, slots, self.cache, None, number)) for number, head in enumerate(self.heads)]
        self.cache.add_uncommitted(final.shape[1])
        self.cache.commit(None, context.num_new)
        logits = self.lm_head(project_down(self.lm_down, torch.cat(states, dim=1)))
        return Draft(MarginalRollout(context.root, logits.float().log_softmax(-1), self.draft_ids))
