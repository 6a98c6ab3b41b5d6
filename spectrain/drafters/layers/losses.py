"""Training losses: divergences between target p and drafter q. Shapes: R rows, V draft vocabulary,
D width.

Every divergence takes log-probabilities [R, V] and returns one loss per row [R]. `log_q` is
normalised over the draft vocabulary. `log_p` is either renormalised over it, or has the target's
own probabilities, which then sum to less than 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from spectrain.features.batch import PLAIN_ROWS, RowLoss
from spectrain.kernels.linear_divergence import DivergenceResult, Projection, linear_divergence
from spectrain.kernels.row_kl import TargetLogits
from spectrain.models.host_copies import on_host


def acceptance_rate(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return sum_v min(p, q) = 1 - TV(p, q), the rate at which rejection sampling accepts tokens
    (Leviathan et al., 2023).
    """
    return torch.minimum(log_p, log_q).exp().sum(-1)


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q), which covers the target's distribution; its gradient is that of the
    soft cross-entropy.
    """
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(q || p), which seeks the target's modes."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def jensen_shannon(log_p: Tensor, log_q: Tensor, beta: float = 0.5) -> Tensor:
    """Return the generalised Jensen-Shannon divergence (Agarwal et al., 2024), divided by beta (1 -
    beta).

    The divergence is beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q. The
    division gives it the same curvature near p = q for every beta, so that one learning rate serves
    all. It tends to KL(p || q) as beta goes to 0 and to KL(q || p) as beta goes to 1.
    """
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return (beta * forward_kl(log_p, log_m) + (1 - beta) * forward_kl(log_q, log_m)) / (
        beta * (1 - beta)
    )


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return 1 - sum_v min(p, q), the rejection rate. It is nearly flat at a random start, so
    warm up with a KL.
    """
    return 1 - acceptance_rate(log_p, log_q)


def negative_log_acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return -log sum_v min(p, q), whose gradient is that of total variation, enlarged where
    acceptance is small.
    """
    return -acceptance_rate(log_p, log_q).clamp(min=1e-5).log()


def lk_hybrid(log_p: Tensor, log_q: Tensor, decay: float = 3.0) -> Tensor:
    """Return w KL(p || q) + (1 - w) TV, with w = exp(-decay * acceptance) as a constant: KL
    first, later acceptance.
    """
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
"""Losses that measure acceptance: the target's mass outside the draft vocabulary counts as
rejected.
"""

LossName = Literal[
    "cross_entropy",
    "forward_kl",
    "reverse_kl",
    "jensen_shannon",
    "total_variation",
    "negative_log_acceptance",
    "lk_hybrid",
]
"""Names of training losses: a divergence from the target, or the cross-entropy of the data's
tokens.
"""
assert {*get_args(LossName)} == {"cross_entropy", *DIVERGENCES}


def get_divergence(name: str, beta: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a divergence by name; `beta` is that of jensen_shannon."""
    return partial(jensen_shannon, beta=beta) if name == "jensen_shannon" else DIVERGENCES[name]


def top_k_loss(log_p: Tensor, log_q: Tensor, count: int = 10) -> Tensor:
    """Return -sum of p log q over the `count` most likely tokens of p (HASS, Zhang et al., 2024,
    section 3.1).

    Unlike a divergence, it is smallest if q has no mass on other tokens.
    """
    top_tokens = log_p.topk(min(count, log_p.shape[-1]), dim=-1)
    return -(top_tokens.values.exp() * log_q.gather(-1, top_tokens.indices)).sum(-1)


def head_loss(
    name: str,
    hidden: Tensor,
    head: Projection,
    tokens: Tensor,
    target_log_probs: Callable[[slice], Tensor] | None,
    rows: RowLoss = PLAIN_ROWS,
    beta: float = 0.5,
    row_weight: Tensor | None = None,
) -> DivergenceResult:
    """Return the summed loss of states [R, D] under an output layer, with the predictions and the
    labels [R].

    The loss is the cross-entropy of `tokens` [R], or a divergence from `target_log_probs`, which
    returns log p [r, V] of a slice of rows. The divergence of `rows`, if they have one, is taken in
    place of the named loss.
    """
    if rows.divergence is not None:
        assert target_log_probs is not None
        return linear_divergence(
            hidden, head, target_log_probs, rows.divergence, row_weight, rows.inputs
        )
    if name == "cross_entropy":
        return linear_divergence(hidden, head, tokens, None, row_weight)
    assert target_log_probs is not None
    # Without a divergence, the kernel computes forward KL.
    divergence = None if name == "forward_kl" else get_divergence(name, beta)
    return linear_divergence(hidden, head, target_log_probs, divergence, row_weight)


class TargetLogitSource(Protocol):
    """A source of the target's log p [r, V] of a slice of rows, or of its logits before
    normalisation.
    """

    def __call__(self, rows: slice, /) -> Tensor: ...

    def target_logits(self, rows: slice, /) -> TargetLogits: ...


class TargetLogProbs:
    """The target's log-probabilities by row, with a cache of the last slice, which several heads
    or draft steps read.
    """

    def __init__(self, source: TargetLogitSource) -> None:
        self.source = source
        self.cached_rows = slice(0, 0)
        self.cached_log_probs: Tensor | None = None  # [r, V] of the cached rows
        self.cached_logits: TargetLogits | None = None  # of the cached rows

    def __call__(self, rows: slice) -> Tensor:
        """Return log p [r, V] of these rows."""
        if self.cached_log_probs is None or not self._is_cached(rows):
            self._clear_cache(rows)
            self.cached_log_probs = self.source(rows)
        return self.cached_log_probs[
            rows.start - self.cached_rows.start : rows.stop - self.cached_rows.start
        ]

    def target_logits(self, rows: slice) -> TargetLogits:
        """Return the logits of these rows, which a kernel normalises."""
        if self.cached_logits is None or not self._is_cached(rows):
            self._clear_cache(rows)
            self.cached_logits = self.source.target_logits(rows)
        return self.cached_logits.select_rows(
            slice(rows.start - self.cached_rows.start, rows.stop - self.cached_rows.start)
        )

    def _is_cached(self, rows: slice) -> bool:
        return bool(self.cached_rows.start <= rows.start < rows.stop <= self.cached_rows.stop)

    def _clear_cache(self, rows: slice) -> None:
        # Free the cache first, so that two slices never exist at the same time.
        self.cached_log_probs = self.cached_logits = None
        self.cached_rows = rows

    def select_rows(self, label_index: Tensor) -> TargetLogitSource:
        """Return a source of the rows `label_index` [R], which ascend; repeated rows cost no
        work.
        """
        return RowSubset(self, label_index)


@dataclass(frozen=True)
class RowSubset:
    """A selection of a source's rows, by ascending indices."""

    source: TargetLogitSource
    label_index: Tensor

    def __call__(self, rows: slice) -> Tensor:
        covering, offsets = self._covering_slice(rows)
        return self.source(covering)[offsets]

    def target_logits(self, rows: slice) -> TargetLogits:
        covering, offsets = self._covering_slice(rows)
        return self.source.target_logits(covering).choose_rows(offsets)

    def _covering_slice(self, rows: slice) -> tuple[slice, Tensor]:
        ends = on_host(self.label_index)[rows]
        first = int(ends[0])
        return slice(first, int(ends[-1]) + 1), self.label_index[rows] - first
