"""DSpark (arXiv 2607.05147): DFlash's block with a Markov head between successive slots and a head
that ends the draft.

Shapes: B batch, A anchors, K drafts of a block, F frontier nodes, W width, M rank of the Markov
head, V draft vocabulary, R judged drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.config.values import NotNegative, Share, Steps, Width
from spectrain.drafters.layers.block_drafter import BlockConfig
from spectrain.drafters.layers.judged_drafts import JudgedDrafts, SlotStates
from spectrain.drafters.layers.low_rank_blocks import CarriedRollout, CombinedLoss, LowRankDrafter
from spectrain.models.target import Target
from spectrain.trees.rollout import Rollout, gather_by_depth

from .base import Losses
from .context import Context
from .step_cost import BatchShape, Run, StepCost

Kind = Literal["vanilla", "gated", "rnn"]


class MarkovHead(nn.Module):
    """Adds a low-rank term W2 m for the previous token to the logits of a draft.

    m [M] is W1's row of that token (vanilla), the row times a gate computed from the slot's state
    (gated), or the output of a recurrent cell along the block (rnn).
    """

    def __init__(
        self, kind: Kind, vocab_size: int, draft_vocab_size: int, rank: int, width: int
    ) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        nn.init.normal_(self.markov_w1.weight, std=0.01)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank) if kind == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank) if kind == "rnn" else None

    def forward(self, hidden: Tensor, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return m and next state [.., M] from a slot's state [.., W], W1's row of the previous
        token, and the last state.
        """
        if self.gate_proj is not None:
            return torch.sigmoid(
                self.gate_proj(torch.cat([hidden, embedded], dim=-1))
            ) * embedded, state
        if self.joint_proj is not None:
            joint = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1))
            gate, candidate, output = joint.chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)
        return embedded, state

    def run_path(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return m [A, K, M] along complete blocks, from states [A, K, W] and previous tokens'
        rows [A, K, M] of W1.
        """
        state = torch.zeros_like(embedded[:, 0])
        states = []
        for slot, before in zip(hidden.unbind(1), embedded.unbind(1)):
            output, state = self(slot, before, state)
            states.append(output)
        return torch.stack(states, dim=1)


class ConfidenceHead(nn.Module):
    """Predicts the logit of a draft's acceptance probability from its slot's state and the
    previous token.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)[..., 0]


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(BlockConfig):
    """Settings of DSpark."""

    # Number of slots in a block, the anchor's slot included.
    block_size: Steps = 7
    # How the Markov head reads the previous token: its embedding (vanilla), gated by the slot's
    # state (gated), or through a recurrent cell (rnn).
    markov_head: Kind = "vanilla"
    # Rank of the Markov head.
    rank: Width = 256
    # Whether to train a head that predicts how often a draft is accepted.
    confidence: bool = True
    # Predicted acceptance probability below which a draft and all later ones are cut; 0 cuts none.
    confidence_threshold: Share = 0.0
    # Weight of the cross-entropy with the data.
    ce: NotNegative = 0.1
    # Weight of the total variation distance from the target.
    tv: NotNegative = 0.9
    # Decay length of the loss weights in slots: draft d, from 0, weighs exp(-d / decay); 0 weighs
    # all drafts alike.
    decay: NotNegative = 4.0
    # Whether each slot drafts the token after its own position, instead of the token at it.
    sample_from_anchor: bool = True


class DSpark(LowRankDrafter):
    """DFlash's layers over a shifted block: slot s, from 0, drafts the token after its own
    position.

    The loss of a draft is ce CE(data) + 2 tv TV(p, q), weighted by exp(-d / decay). A confidence
    head adds its binary cross-entropy with the acceptance probability sum_v min(p, q). A draft with
    a confidence below `confidence_threshold` is cut together with all later ones.
    """

    saved = replace(
        LowRankDrafter.saved,
        shape=(*LowRankDrafter.saved.shape, "markov_head", "rank", "confidence"),
    )

    def __init__(self, target: Target, config: DSparkConfig) -> None:
        super().__init__(target, config)
        # The target's mass outside the draft vocabulary counts as rejected.
        self.divergence = "total_variation"
        self.ce = config.ce
        self.tv = config.tv
        self.confidence_threshold = config.confidence_threshold
        self.markov = MarkovHead(
            config.markov_head, target.head.vocab_size, len(self.d2t), config.rank, target.width
        )
        self.confidence_head = (
            ConfidenceHead(target.width + config.rank) if config.confidence else None
        )
        if self.cuts_drafts:
            # The host decides where a draft stops.
            self.capabilities = replace(self.capabilities, capture=None)

    @property
    def cuts_drafts(self) -> bool:
        """Whether drafts end below a confidence threshold."""
        return self.confidence_head is not None and self.confidence_threshold > 0

    @property
    def readout(self) -> nn.Linear:
        return self.markov.markov_w2

    # Training

    def step_cost(self, target: Target, batch: BatchShape) -> StepCost:
        """Return DFlash's cost with the Markov head's cell in each slot and its state as further
        input of the output layer.
        """
        cost = super().step_cost(target, batch)
        rank = self.markov.rank
        cell = self.markov.gate_proj or self.markov.joint_proj or nn.Identity()
        inputs = 2 * (target.width + rank) + 5 * rank * (self.markov.kind == "rnn")
        runs = [*cost.runs, Run(cell, cost.judged.rows, 0, extra=inputs)]
        return replace(cost, runs=runs)

    def judge_drafts(self, drafts: JudgedDrafts) -> Losses:
        """Compute all terms in one pass through the joint output layer, which includes the
        Markov head.
        """
        embedded = self.markov.markov_w1(drafts.previous_tokens)
        markov_states = drafts.select_judged(self.markov.run_path(drafts.states, embedded))
        loss = CombinedLoss(self.ce, 2 * self.tv)
        weights = drafts.decayed_weights(self.decay)
        judged = loss.judge(
            drafts,
            torch.cat([drafts.hidden, markov_states], dim=-1),
            self.joint_projection,
            weights,
        )
        terms = {"ce_tv": judged.loss}
        if self.confidence_head is not None:
            confidence = self.confidence_head(
                torch.cat([drafts.hidden, drafts.select_judged(embedded)], dim=-1)
            )
            acceptance_rates = (
                torch.cat(loss.acceptance_rates) if loss.acceptance_rates else confidence.detach()
            )
            terms["confidence"] = F.binary_cross_entropy_with_logits(
                confidence, acceptance_rates.to(confidence.dtype), weights, reduction="sum"
            )
        return drafts.sum_losses(terms, judged.predictions)

    # Decoding

    def make_rollout(self, context: Context, slots: SlotStates) -> Rollout:
        return _Markov(self, context.root, slots.draft_states)


class _Markov(CarriedRollout):
    """Drafts one round: a node's logits are its slot's plus the Markov head's term of its token,
    or with rnn of its path.
    """

    def __init__(self, drafter: DSpark, root: Tensor, states: Tensor) -> None:
        super().__init__(root, states.shape[1], states.new_zeros(len(root), drafter.markov.rank))
        # [B, K, W], [B, K, V]
        self.drafter = drafter
        self.states = states
        self.products = drafter.compute_products(states)
        self.draft_ids = drafter.draft_ids

    def step(self, depth: Tensor, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        drafter = self.drafter
        hidden = gather_by_depth(self.states, depth)
        embedded = drafter.markov.markov_w1(tokens)
        term, state = drafter.markov(hidden, embedded, state)
        if drafter.confidence_head is not None and (
            drafter.cuts_drafts or drafter.capabilities.estimates_acceptance
        ):
            confidence = drafter.confidence_head(torch.cat([hidden, embedded], dim=-1))
            self.accept_probs = confidence.sigmoid()
            if drafter.cuts_drafts:
                self.stop_mask = self.accept_probs < drafter.confidence_threshold
        return drafter.corrected_log_q(gather_by_depth(self.products, depth), term), state
