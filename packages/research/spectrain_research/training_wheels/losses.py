"""The consistency of a student that may ask its teacher (knowledge distillation with training
wheels, arXiv 2502.17717).

In a state the student writes a token y, for the reward log p(y) by the teacher's distribution p, or
asks, for the reward -price, and the teacher writes the token. The policy is one distribution over
the tokens and the asking: it writes y with the probability (1 - g) pi(y) and asks with g. It gains
the rewards and its own entropy, as in path consistency learning (Nachum et al., 2017). For the best
policy and its values V, each step of each text has

    V(s) - V(s') = r - log policy(action),

whatever wrote the text. V is 0 after its end. Shapes: R rows.
"""

from __future__ import annotations

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
