"""Divergences between target p and drafter q, and what a family is trained on. Shapes: R rows, V draft vocabulary, D width.

Every divergence takes log-probabilities [R, V] and returns one loss a row [R]. `log_q` is normalised over the draft
vocabulary; `log_p` is either renormalised over it or carries the target's own mass, which then sums to less than 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from spectrain.kernels.linear_divergence import DivergenceResult, Projection, TargetLogits, linear_divergence


def acceptance_rate(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum_v min(p, q) = 1 - TV(p, q): how often rejection sampling keeps a token drawn from q (Leviathan et al., 2023)."""
    return torch.minimum(log_p, log_q).exp().sum(-1)


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q): covers what the target may say; its gradient is that of the soft cross-entropy."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q || p): seeks the target's modes."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def jensen_shannon(log_p: Tensor, log_q: Tensor, beta: float = 0.5) -> Tensor:
    """The generalised Jensen-Shannon divergence (Agarwal et al., 2024), over beta (1 - beta).

    It is beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q. Divided so, all of them have the same curvature
    near p = q, both KLs included: it tends to KL(p || q) as beta goes to 0 and to KL(q || p) as it goes to 1, and one
    learning rate serves every beta.
    """
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return (beta * forward_kl(log_p, log_m) + (1 - beta) * forward_kl(log_q, log_m)) / (beta * (1 - beta))


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
ACCEPTANCE_LOSSES = {"total_variation", "negative_log_acceptance", "lk_hybrid"}
"""Losses that measure acceptance: the target's mass outside the draft vocabulary counts as rejected."""


LossName = Literal[
    "cross_entropy", "forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "negative_log_acceptance", "lk_hybrid"
]
"""What a family may be trained on: a divergence from the target, or the tokens of the data."""
assert {*get_args(LossName)} == {"cross_entropy", *DIVERGENCES}


def get_divergence(name: str, beta: float) -> Callable[[Tensor, Tensor], Tensor]:
    """A divergence by name; `beta` is that of jensen_shannon."""
    return partial(jensen_shannon, beta=beta) if name == "jensen_shannon" else DIVERGENCES[name]


def split_loss(log_p: Tensor, log_q: Tensor, tokens_past_error: Tensor, decay: float = 0.8) -> Tensor:
    """Draft-OPD's: half of KL(p || q) where a draft was kept, half of decay^k KL(q || p) at distance [R] k behind its first
    wrong token, where p is what the target says after the drafted tokens."""
    rejected = decay ** tokens_past_error.clamp(min=0) * reverse_kl(log_p, log_q)
    return 0.5 * torch.where(tokens_past_error < 0, forward_kl(log_p, log_q), rejected)


def top_k_loss(log_p: Tensor, log_q: Tensor, count: int = 10) -> Tensor:
    """-sum of p log q over the `count` likeliest tokens by p (HASS, Zhang et al., 2024, section 3.1): what drafts are made of.
    Unlike a divergence it is least where q has no mass elsewhere."""
    likeliest = log_p.topk(min(count, log_p.shape[-1]), dim=-1)
    return -(likeliest.values.exp() * log_q.gather(-1, likeliest.indices)).sum(-1)


def head_loss(
    name: str,
    hidden: Tensor,
    head: Projection,
    tokens: Tensor,
    target_log_probs: Callable[[slice], Tensor] | None,
    tokens_past_error: Tensor | None = None,
    beta: float = 0.5,
    row_weight: Tensor | None = None,
) -> DivergenceResult:
    """The summed loss of states [R, D] under an output layer, with the drafter's most likely entries and the labels [R].

    By name it is the cross-entropy of `tokens` [R] or a divergence from `theirs`, which gives log p [r, V] of a chunk of
    rows; of replayed drafts, which have a `distance` [R], it is the split loss whatever the name.
    """
    if tokens_past_error is not None:
        assert target_log_probs is not None
        return linear_divergence(hidden, head, target_log_probs, split_loss, row_weight, (tokens_past_error,))
    if name == "cross_entropy":
        return linear_divergence(hidden, head, tokens, None, row_weight)
    assert target_log_probs is not None
    chosen = None if name == "forward_kl" else get_divergence(name, beta)  # without one it is forward KL, in one kernel
    return linear_divergence(hidden, head, target_log_probs, chosen, row_weight)


class TargetLogitSource(Protocol):
    """A target that answers for the rows of a slice: by log p [r, V], or as a kernel reads it."""

    def __call__(self, rows: slice, /) -> Tensor: ...

    def target_logits(self, rows: slice, /) -> TargetLogits: ...


class TargetLogProbs:
    """What a target says of its rows; those asked for last are kept, for several heads or draft steps ask for the same."""

    def __init__(self, source: TargetLogitSource) -> None:
        self.source, self.cached_rows = source, slice(0, 0)  # the rows whose answers are kept
        self.cached_log_probs: Tensor | None = None  # their log p [r, V]
        self.cached_logits: TargetLogits | None = None  # the same before it is normalised, where it was asked for so

    def __call__(self, rows: slice) -> Tensor:
        """log p [r, V] of these rows."""
        if self.cached_log_probs is None or not self._is_cached(rows):
            self._clear_cache(rows)
            self.cached_log_probs = self.source(rows)
        return self.cached_log_probs[rows.start - self.cached_rows.start : rows.stop - self.cached_rows.start]

    def target_logits(self, rows: slice) -> TargetLogits:
        """What the target says of these rows, for a kernel to normalise."""
        if self.cached_logits is None or not self._is_cached(rows):
            self._clear_cache(rows)
            self.cached_logits = self.source.target_logits(rows)
        return self.cached_logits.select_rows(slice(rows.start - self.cached_rows.start, rows.stop - self.cached_rows.start))

    def _is_cached(self, rows: slice) -> bool:
        return bool(self.cached_rows.start <= rows.start < rows.stop <= self.cached_rows.stop)

    def _clear_cache(self, rows: slice) -> None:
        self.cached_log_probs = self.cached_logits = None  # freed first, so that two chunks are never held
        self.cached_rows = rows

    def select_rows(self, label_index: Tensor) -> TargetLogitSource:
        """What the target says of the rows `answers` [R], ascending; repeated ones cost no work."""
        return RowSubset(self, label_index)


@dataclass(frozen=True)
class RowSubset:
    """Some rows of a target's, in this order."""

    source: TargetLogitSource
    label_index: Tensor

    def __call__(self, rows: slice) -> Tensor:
        around, places = self._covering_slice(rows)
        return self.source(around)[places]

    def target_logits(self, rows: slice) -> TargetLogits:
        around, places = self._covering_slice(rows)
        return self.source.target_logits(around).select_rows(places)

    def _covering_slice(self, rows: slice) -> tuple[slice, Tensor]:
        asked = self.label_index[rows]
        first, last = asked[[0, -1]].tolist()
        return slice(first, last + 1), asked - first
