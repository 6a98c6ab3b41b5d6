"""The choice of sampled windows for policy training, and the penalty on divergence from the initial
policy (PPOW, Jiang and Sun, 2026, arXiv 2605.14978). Shapes: B batch, N nodes, T tokens, V
vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from math import log
from statistics import fmean

import torch
from torch import Tensor

from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target
from spectrain.trees.base import RoundResult, TreeBuilder
from spectrain_research.shared.draft_replay import DraftRecorder, DraftWindow

MIN_WEIGHT = 1e-9  # weight of a window in which nothing differs


MIN_PROB = 1e-30  # below which a drafter's probability counts as this much


def compute_criticality(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return (1 - H(p) / log V) KL(p || q) [...] of log p and log q [..., V]: the drafter's
    error where the target is sure.
    """
    p = log_p.exp()
    width = log_p.shape[-1]
    sure = 1 - torch.special.entr(p).sum(-1) / log(width)
    return sure * (p * (log_p - log_q)).sum(-1)


class CriticalityRecorder(DraftRecorder):
    """Records drawn chains, and of every drafted token the criticality of the place where it was
    drawn.

    Both distributions are those of the round, so any family whose drafts are drawn can be weighed.
    A drafter with a smaller vocabulary is compared with the target's distribution over that
    vocabulary.
    """

    def __init__(self, builder: TreeBuilder) -> None:
        super().__init__(builder)
        # Of every row, one list for each round that drafted.
        self.criticality: list[list[list[float]]] = []

    def observe(self, round: RoundResult) -> None:
        super().observe(round)
        tree = round.tree
        assert tree.q is not None, "drafts of a policy are drawn"
        logits = round.logits.float()
        logits = (
            logits[..., : tree.q.shape[-1]]
            if tree.draft_ids is None
            else logits[..., tree.draft_ids]
        )
        # [B, N]
        values = compute_criticality(
            logits.log_softmax(-1), tree.q.float().clamp(min=MIN_PROB).log()
        )
        self.criticality = self.criticality or [[] for _ in round.counts]
        lengths = (tree.valid & tree.can_emit)[:, 1:].sum(1)
        for rounds, row, length, count in zip(
            self.criticality, values.tolist(), lengths.tolist(), round.counts.tolist()
        ):
            if count and length:
                # In a chain, token i was drawn after node i - 1.
                rounds.append(row[:length])


def weigh_windows(windows: list[DraftWindow], criticality: list[list[float]]) -> list[float]:
    """Return the weight of each window of an answer where one is drawn: the mean criticality at its
    tokens.

    `criticality` has a list for each round that drafted; the first of these rounds gives no window.
    """
    lengths = [len(window.example.tokens) - window.start for window in windows]
    return [
        max(MIN_WEIGHT, fmean(values[:length])) for length, values in zip(lengths, criticality[1:])
    ]


def penalize_divergence(
    window: DraftWindow, writer: Target, reference: Target, weight: float, temperature: float
) -> DraftWindow:
    """A window whose drawn tokens bring `weight` (log q - log r) less, r being the reference's: at
    each place, over what may be drawn there, the gradient of A log q then is that of the reward
    less that of weight KL(q || r)."""
    tokens = window.example.tokens
    drawn = torch.tensor(tokens[window.start :])
    drawn_log_probs, reference_log_probs = (
        log_probs(model, tokens[:-1], temperature)[window.start - 1 :]
        .cpu()
        .gather(1, drawn[:, None])[:, 0]
        for model in (writer, reference)
    )
    costs = [0.0] * window.start + (weight * (drawn_log_probs - reference_log_probs)).tolist()
    return replace(window, advantage=[gain - cost for gain, cost in zip(window.advantage, costs)])


@torch.no_grad()
def log_probs(model: Target, text: list[int], temperature: float = 1.0) -> Tensor:
    """What a model says after every token of a text, [T, V]."""
    logits = model.run(torch.tensor([text], device=model.device), ForwardPlan(logits=True)).logits
    assert logits is not None
    return (logits[0].float() / temperature).log_softmax(-1)
