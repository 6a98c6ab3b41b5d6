"""The consistency of a student that may ask its teacher (knowledge distillation with training
wheels, arXiv 2502.17717).

In a state the student writes a token y, for the reward log p(y) by the teacher's distribution p, or
asks, for the reward -price, and the teacher writes the token. The policy is one distribution over
the tokens and the asking: it writes y with the probability (1 - g) pi(y) and asks with g. It gains
the rewards and its own entropy, as in path consistency learning (Nachum et al., 2017). For the best
policy and its values V, each step of each text has

    V(s) - V(s') = r - log policy(action),

whatever wrote the text. V is 0 after its end. Over a span of several actions the sides add up, so
the inconsistency of a span is the sum of those of its actions. Shapes: R rows, B batch, T tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def writing_error(
    value_drop: Tensor, ask_logits: Tensor, student: Tensor, teacher: Tensor
) -> Tensor:
    """Return the inconsistencies [R] of writing a token, from V(s) - V(s') [R], the logits [R] of
    asking, and the token's log-probabilities [R] by student and teacher.
    """
    return value_drop + F.logsigmoid(-ask_logits) + student - teacher


def asking_error(value_drop: Tensor, ask_logits: Tensor, price: Tensor) -> Tensor:
    """Return the inconsistencies [R] of asking for a token that the teacher wrote."""
    return value_drop + F.logsigmoid(ask_logits) + price


def span_errors(first: Tensor, writing: Tensor, is_row: Tensor, span: int) -> Tensor:
    """Return the inconsistencies [R] of spans that begin with an action of the inconsistency
    `first` [R] and write the tokens after it, with those of `writing` [R].

    `is_row` [B, T] marks the rows. A span has at most `span` actions, and ends where the rows that
    follow each other end, as at the end of an answer.
    """
    grid = torch.zeros(is_row.shape, dtype=writing.dtype, device=writing.device)
    grid = grid.masked_scatter(is_row, writing)
    total, goes_on = first, is_row
    for step in range(1, min(span, is_row.shape[1])):
        # What stands `step` tokens later; nothing stands behind the last column.
        goes_on = goes_on & F.pad(is_row[:, step:], (0, step))
        total = total + (F.pad(grid[:, step:], (0, step)) * goes_on)[is_row]
    return total
