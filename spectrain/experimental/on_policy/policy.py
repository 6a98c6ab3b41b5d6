"""The choice of sampled windows for policy training, and the penalty on divergence from the initial policy (PPOW, Jiang and
Sun, 2026, arXiv 2605.14978). Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from math import log

import torch
from torch import Tensor

from spectrain.experimental.shared.draft_replay import DraftWindow
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.target import Target

MIN_WEIGHT = 1e-9  # weight of a window in which nothing differs


def compute_criticality(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return (1 - H(p) / log V) KL(p || q) [T] of log p and log q [T, V]: the drafter's error where the target is sure."""
    p = log_p.exp()
    sure = 1 + (p * log_p).sum(-1) / log(log_p.shape[-1])
    return sure * (p * (log_p - log_q)).sum(-1)


def weigh_windows(windows: list[DraftWindow], text: list[int], target: Target, writer: Target) -> list[float]:
    """What each window of a text weighs where one is drawn: the mean criticality at its tokens, all of which but the last one
    are the text's."""
    log_p, log_q = log_probs(target, text), log_probs(writer, text)
    width = min(log_p.shape[-1], log_q.shape[-1])
    values = compute_criticality(log_p[:, :width].log_softmax(-1), log_q[:, :width].log_softmax(-1))
    return [max(MIN_WEIGHT, float(values[window.start - 1 : len(window.example.tokens) - 1].mean())) for window in windows]


def penalize_divergence(
    window: DraftWindow, writer: Target, reference: Target, weight: float, temperature: float
) -> DraftWindow:
    """A window whose drawn tokens bring `weight` (log q - log r) less, r being the reference's: at each place, over what may be
    drawn there, the gradient of A log q then is that of the reward less that of weight KL(q || r)."""
    tokens = window.example.tokens
    drawn = torch.tensor(tokens[window.start :])
    drawn_log_probs, reference_log_probs = (
        log_probs(model, tokens[:-1], temperature)[window.start - 1 :].cpu().gather(1, drawn[:, None])[:, 0]
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
