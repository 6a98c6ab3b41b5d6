"""Calibration of a drafter's estimates of acceptance, by one temperature for each position of a
chain (sequential temperature scaling; DSpark, arXiv 2607.05147, section 3.2).

A drafter estimates for every draft token the probability c_i that it is accepted if those before it
are. All tokens up to position k are accepted with probability prod_{i <= k} sigmoid(logit(c_i) /
T_i). Temperatures T_1, T_2, .. are chosen one after the other, each with those before it fixed, as
those with the least expected calibration error of this product.

Shapes: R rounds, K positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.trees.base import Prefix, TreeBuilder, WrappedBuilder
from spectrain.trees.rollout import Draft, Rollout
from spectrain.trees.token_tree import TokenTree

TEMPERATURES = np.logspace(-1, 1, 41)
NUM_BINS = 15
MIN_ROUNDS = 50
"""Rounds of either half of the prompts, below which nothing is fitted."""
SMALLEST = 1e-6


class EstimatingRollout(Rollout):
    """Wraps a rollout of chains, and records the estimates of every draft token."""

    def __init__(self, inner: Rollout) -> None:
        self.inner = inner
        self.draft_ids, self.depth_limit = inner.draft_ids, inner.depth_limit
        self.estimates: list[Tensor] = []  # [B] by position

    def start(self) -> Tensor:
        return self._record(self.inner.start())

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self._record(self.inner.extend(tokens, parents))

    def _record(self, log_probs: Tensor) -> Tensor:
        self.stop_mask = self.inner.stop_mask
        if self.inner.accept_probs is not None:
            self.estimates.append(self.inner.accept_probs[:, 0])
        return log_probs


class EstimateRecorder(WrappedBuilder):
    """Builds the chains of another builder, and records the estimates of each round."""

    def __init__(self, builder: TreeBuilder) -> None:
        super().__init__(builder)
        self.rounds: list[list[Tensor]] = []

    def grow(self, prefix: Prefix, draft: Draft) -> TokenTree:
        assert draft.rollout is not None, "a drafter with estimates drafts step by step"
        recorded = EstimatingRollout(draft.rollout)
        self.rounds.append(recorded.estimates)
        return self.builder.grow(prefix, replace(draft, rollout=recorded))


@dataclass(frozen=True)
class JudgedRounds:
    """Estimates of rounds with what became of their draft tokens."""

    # [R, K] estimated acceptance of a token if those before it are accepted
    estimates: np.ndarray
    # [R, K] whether all tokens up to a position were accepted
    accepted: np.ndarray


def record_rounds(
    target: Target,
    drafter: Drafter,
    builder: TreeBuilder,
    rule: AcceptanceRule,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
) -> JudgedRounds:
    """Decode prompts one by one, and return the estimates of all rounds whose drafts were judged
    whole.
    """
    estimates = []
    accepted = []
    positions = np.arange(builder.depth)
    before = drafter.capabilities
    drafter.capabilities = replace(before, estimates_acceptance=True)
    try:
        for key, prompt in enumerate(prompts, 1):
            recorder = EstimateRecorder(builder)
            (answer,) = decode(target, [prompt], rule, max_new_tokens, drafter, recorder, [key])
            for round_estimates, length in zip(recorder.rounds, answer.round_lengths):
                if len(round_estimates) == len(positions):
                    estimates.append([float(estimate[0]) for estimate in round_estimates])
                    accepted.append(positions < length - 1)
    finally:
        drafter.capabilities = before
    shape = -1, len(positions)
    return JudgedRounds(np.array(estimates).reshape(shape), np.array(accepted).reshape(shape))


def compute_survival(estimates: np.ndarray, temperatures: Sequence[float]) -> np.ndarray:
    """Return the estimated probabilities [R, K] that all tokens up to a position are accepted."""
    clipped = estimates.clip(SMALLEST, 1 - SMALLEST)
    logits = np.log(clipped) - np.log1p(-clipped)
    scaled: np.ndarray = 1 / (1 + np.exp(-logits / np.asarray(temperatures)))
    return scaled.cumprod(axis=1)


def measure_error(probs: np.ndarray, outcomes: np.ndarray) -> float:
    """Return the expected calibration error of R probabilities: over bins of equal width, the mean
    difference between the mean probability and the share of outcomes, weighted by size.
    """
    bins = np.minimum((probs * NUM_BINS).astype(int), NUM_BINS - 1)
    differences = np.bincount(bins, probs - outcomes, NUM_BINS)
    return float(np.abs(differences).sum() / len(probs))


def measure_errors(rounds: JudgedRounds, temperatures: Sequence[float]) -> list[float]:
    """Return the calibration error of accepting all tokens up to each position."""
    survival = compute_survival(rounds.estimates, temperatures)
    return [measure_error(*pair) for pair in zip(survival.T, rounds.accepted.T, strict=True)]


def fit_temperatures(rounds: JudgedRounds) -> list[float]:
    """Return the temperatures by position, chosen one after the other among `TEMPERATURES`; of
    equal ones that nearest to 1, so that estimates that are right stay.
    """
    nearest_first = sorted(TEMPERATURES, key=lambda value: abs(np.log(value)))
    chosen: list[float] = []
    for position in range(rounds.estimates.shape[1]):
        estimates = rounds.estimates[:, : position + 1]
        outcomes = rounds.accepted[:, position]

        def error(value: float) -> float:
            survival = compute_survival(estimates, [*chosen, value])  # noqa: B023
            return measure_error(survival[:, -1], outcomes)  # noqa: B023

        chosen.append(float(min(nearest_first, key=error)))
    return chosen


def calibrate(fitted: JudgedRounds, judged: JudgedRounds) -> dict[str, Any]:
    """Fit temperatures to some rounds and measure them on others, for summary.json."""
    counts = [len(rounds.estimates) for rounds in (fitted, judged)]
    if min(counts) < MIN_ROUNDS:
        raise UserError(
            f"eval.confidence=true: {min(counts)} rounds of a half of the prompts are too few; "
            f"{MIN_ROUNDS} are needed, so raise eval.limit or eval.max_new_tokens"
        )
    temperatures = fit_temperatures(fitted)
    return {
        "temperatures": [round(value, 4) for value in temperatures],
        "ece_before": [
            round(value, 4) for value in measure_errors(judged, [1.0] * len(temperatures))
        ],
        "ece_after": [round(value, 4) for value in measure_errors(judged, temperatures)],
        "rounds": counts[0],
        "judged_rounds": counts[1],
    }
