"""Divergences between target p and drafter q. Shapes: R rows, V draft vocabulary.

Every function takes log-probabilities [R, V] and returns one loss a row [R]. `log_q` is normalised over the draft
vocabulary; `log_p` is either renormalised over it or carries the target's own mass, which then sums to less than 1.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def acceptance_rate(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum_v min(p, q) = 1 - TV(p, q): how often rejection sampling keeps a token drawn from q (Leviathan et al., 2023)."""
    return torch.minimum(log_p, log_q).exp().sum(-1)


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q): covers what the target may say; its gradient is that of the soft cross-entropy."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q || p): seeks the target's modes."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def jensen_shannon(log_p: Tensor, log_q: Tensor) -> Tensor:
    """The Jensen-Shannon divergence, half of each KL to the even mixture."""
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return 0.5 * (forward_kl(log_p, log_m) + forward_kl(log_q, log_m))


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """1 - sum_v min(p, q): the rejection rate itself. Nearly flat from a random start, so warm up with a KL."""
    return 1 - acceptance_rate(log_p, log_q)


def negative_log_acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """-log sum_v min(p, q): total variation with its gradient rescaled where acceptance is small."""
    return -acceptance_rate(log_p, log_q).clamp(min=1e-5).log()


def lk_hybrid(log_p: Tensor, log_q: Tensor, decay: float = 3.0) -> Tensor:
    """w KL(p || q) + (1 - w) TV with w = exp(-decay * acceptance), held constant: KL early, acceptance late."""
    acceptance = acceptance_rate(log_p, log_q)
    weight = torch.exp(-decay * acceptance.detach())
    return weight * forward_kl(log_p, log_q) + (1 - weight) * (1 - acceptance)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "negative_log_acceptance": negative_log_acceptance,
    "lk_hybrid": lk_hybrid,
}
UNNORMALISED = {"total_variation", "negative_log_acceptance", "lk_hybrid"}
"""Losses that measure acceptance: the target's mass outside the draft vocabulary counts as rejected."""
