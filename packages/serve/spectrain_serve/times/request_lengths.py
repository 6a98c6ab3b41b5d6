"""Draft tokens for each text of a batch, by what the target accepted of this text and by how many
texts are decoded together: FASER's lengths by request (Chen et al., 2026, arXiv 2604.20503), in
simulation.

Texts differ in how often their drafts are right. A text's rate is drawn from a Beta distribution
that is fitted to the measured texts, so that the noise of few rounds is no difference of texts. The
policy does not know a request's rate. It knows the distribution and what the request has accepted.
The whole batch drafts as many steps as its longest draft has tokens, and each draft token is a row
of the target's forward. Shapes: N texts, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import inf, lgamma
from typing import Any

import numpy as np

from . import load
from .load import (
    NUM_REQUESTS,
    LoadPoint,
    SimulatedRequest,
    TimeTable,
    draw_requests,
    serve_rounds,
    summarize_load,
)

STRENGTHS = tuple(2.0**power for power in range(1, 11))
"""Draft tokens that the distribution of rates counts as much as; with infinitely many, texts do not
differ."""


@dataclass(frozen=True)
class RateDistribution:
    """The Beta distribution of the texts' acceptance rates."""

    mean: float
    # The sum of its two parameters; infinite where all texts have the mean.
    strength: float

    @classmethod
    def fit(cls, counts: Sequence[tuple[int, int]]) -> RateDistribution:
        """Fit it to the accepted and the judged draft tokens of texts: of the strengths the most
        likely one.
        """
        accepted, judged = (sum(column) for column in zip(*counts))
        # No text accepts all or nothing for ever.
        mean = (accepted + 0.5) / (judged + 1)

        def log_likelihood(strength: float) -> float:
            if strength == inf:
                return float(accepted * np.log(mean) + (judged - accepted) * np.log(1 - mean))
            right = mean * strength
            wrong = strength - right
            none = log_beta(right, wrong)
            return sum(log_beta(right + k, wrong + n - k) - none for k, n in counts)

        return cls(mean, max((*STRENGTHS, inf), key=log_likelihood))

    def draw_rates(self, random: np.random.Generator, num_texts: int) -> np.ndarray:
        """Draw the rates [N] of texts."""
        if self.strength == inf:
            return np.full(num_texts, self.mean)
        right = self.mean * self.strength
        return random.beta(right, self.strength - right, num_texts)

    def survival(self, accepted: Sequence[int], judged: Sequence[int], depth: int) -> np.ndarray:
        """Return the probabilities [N, depth] that the first 1, 2, .. draft tokens of a text are
        all accepted, given the draft tokens that it accepted and that were judged.
        """
        steps = np.arange(depth)
        if self.strength == inf:
            return np.tile(self.mean ** (1 + steps), (len(accepted), 1))
        right = self.mean * self.strength + np.asarray(accepted)[:, None]
        total = self.strength + np.asarray(judged)[:, None]
        return np.cumprod((right + steps) / (total + steps), axis=1)


def log_beta(left: float, right: float) -> float:
    """Return the logarithm of the Beta function."""
    return lgamma(left) + lgamma(right) - lgamma(left + right)


@dataclass(frozen=True)
class RoundCost:
    """What a round with N texts takes, in seconds."""

    # A step without a drafter.
    step: float
    # Drafting one token for all texts.
    draft: float
    # One draft token of one text in the target's forward.
    row: float

    @classmethod
    def read(cls, table: TimeTable, num_texts: int, num_tokens: int) -> RoundCost:
        """Return the cost with so many texts, whose measured rounds have `num_tokens` draft tokens
        for each. A round is at least a step.
        """
        step = table.interpolate(table.step_seconds, num_texts)
        extra = max(0.0, table.interpolate(table.round_seconds, num_texts) - step)
        draft = table.interpolate(table.draft_seconds, num_texts) if table.draft_seconds else 0.0
        draft = min(draft, extra)
        return cls(step, draft / num_tokens, (extra - draft) / (num_texts * num_tokens))

    def seconds(self, lengths: Sequence[int]) -> float:
        """Return the seconds of a round whose texts have these draft tokens [N]."""
        return self.step + self.draft * max(lengths) + self.row * sum(lengths)


def choose_lengths(survival: np.ndarray, cost: RoundCost) -> list[int]:
    """Return the draft tokens [N] of texts that give most tokens per second; of equals the fewest.

    `survival` [N, K] does not rise along K. With a longest draft of m tokens, and a number of draft
    tokens in all, those with the largest probabilities of the first m columns are best.
    """
    num_texts, depth = survival.shape
    best = num_texts / max(cost.step, 1e-12)
    lengths = [0] * num_texts
    for longest in range(1, depth + 1):
        # Earlier columns come first among equals, so that a text's tokens are its first ones.
        order = np.argsort(-survival[:, :longest].T.ravel(), kind="stable")
        gains = np.cumsum(survival[:, :longest].T.ravel()[order])
        seconds = cost.step + cost.draft * longest + cost.row * np.arange(1, len(order) + 1)
        rates = (num_texts + gains) / np.maximum(seconds, 1e-12)
        count = int(rates.argmax())
        if rates[count] > best * (1 + 1e-12):
            best = float(rates[count])
            lengths = np.bincount(order[: count + 1] % num_texts, minlength=num_texts).tolist()
    return lengths


@dataclass
class DraftedRequest(SimulatedRequest):
    """A request whose drafts are right or wrong at each token of its answer, whoever drafts."""

    # Whether the draft of each token of the answer is right [tokens].
    rights: np.ndarray | None = None
    accepted: int = 0
    judged: int = 0

    def run_round(self, length: int) -> int:
        """Judge a draft of `length` tokens; return the tokens that the round emits."""
        assert self.rights is not None
        first = self.tokens - self.remaining
        drafted = self.rights[first : first + length]
        wrong = np.flatnonzero(~drafted)
        correct = int(wrong[0]) if len(wrong) else len(drafted)
        self.accepted += correct
        self.judged += min(correct + 1, len(drafted))
        return 1 + correct


LengthPolicy = Callable[[Sequence[DraftedRequest]], list[int]]
"""Chooses the draft tokens of every text of a round."""


def simulate_lengths(
    table: TimeTable,
    rates: RateDistribution,
    num_tokens: int,
    policy: LengthPolicy,
    arrival_rate: float,
    bound_ms: float,
    num_requests: int = NUM_REQUESTS,
) -> LoadPoint:
    """Simulate requests with rates of their own. Arrivals, answers and right drafts are the same
    for every policy.
    """
    random = np.random.default_rng(0)
    plain = draw_requests(table, arrival_rate, num_requests, random)
    requests = [
        DraftedRequest(
            request.arrival,
            request.remaining,
            request.tokens,
            rights=random.random(request.tokens) < rate,
        )
        for request, rate in zip(plain, rates.draw_rates(random, num_requests))
    ]

    def run_round(active: Sequence[DraftedRequest]) -> tuple[float, list[int]]:
        lengths = policy(active)
        seconds = RoundCost.read(table, len(active), num_tokens).seconds(lengths)
        return seconds, [text.run_round(length) for text, length in zip(active, lengths)]

    num_texts = serve_rounds(table, run_round, requests)
    return summarize_load(requests, arrival_rate, bound_ms, num_texts)


def simulate_request_lengths(
    table: TimeTable, num_tokens: int, bound_ms: float, num_requests: int = NUM_REQUESTS
) -> dict[str, Any]:
    """Serve the same requests with lengths by request, with one length for all texts of a round,
    and with `num_tokens` in every round, for summary.json.

    gains: seconds per token, waiting included, of one length for all texts over those of lengths by
    request, by rate of arrivals. Both know the same times and the same distribution of rates.
    """
    rates = RateDistribution.fit([count_drafts(counts, num_tokens) for counts in table.text_rounds])

    def by_request(active: Sequence[DraftedRequest]) -> list[int]:
        survival = rates.survival(
            [text.accepted for text in active], [text.judged for text in active], num_tokens
        )
        return choose_lengths(survival, RoundCost.read(table, len(active), num_tokens))

    def by_batch(active: Sequence[DraftedRequest]) -> list[int]:
        cost = RoundCost.read(table, len(active), num_tokens)
        means = np.cumsum(rates.survival([0], [0], num_tokens)[0])
        speeds = [1 / max(cost.step, 1e-12)] + [
            (1 + means[length - 1]) / max(cost.seconds([length] * len(active)), 1e-12)
            for length in range(1, num_tokens + 1)
        ]
        return [int(np.argmax(speeds))] * len(active)

    policies: dict[str, LengthPolicy] = {
        "fixed": lambda active: [num_tokens] * len(active),
        "by_batch": by_batch,
        "by_request": by_request,
    }
    arrivals = [share * table.capacity() for share in load.LOADS]
    points = {
        name: [
            simulate_lengths(table, rates, num_tokens, policy, rate, bound_ms, num_requests)
            for rate in arrivals
        ]
        for name, policy in policies.items()
    }
    return {
        "mean_rate": round(rates.mean, 4),
        # Standard deviation of the texts' rates, beyond the noise of few rounds.
        "rate_deviation": round((rates.mean * (1 - rates.mean) / (rates.strength + 1)) ** 0.5, 4),
        "rates": [round(rate, 5) for rate in arrivals],
        "gains": [
            round(before.seconds_per_token / after.seconds_per_token, 4)
            for before, after in zip(points["by_batch"], points["by_request"])
        ],
        "policies": {name: [asdict(point) for point in line] for name, line in points.items()},
    }


def count_drafts(round_counts: Sequence[int], num_tokens: int) -> tuple[int, int]:
    """Return the accepted and the judged draft tokens of a text, from its numbers of rounds that
    emitted 1, 2, .. tokens. The first wrong token ends what is judged.
    """
    accepted = sum(count * correct for correct, count in enumerate(round_counts))
    judged = sum(count * min(correct + 1, num_tokens) for correct, count in enumerate(round_counts))
    return accepted, judged
