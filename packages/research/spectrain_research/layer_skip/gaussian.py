"""Bayesian optimisation of skipped halves (Draft & Verify, Zhang et al., 2024, section 3.3).

Shapes: N scored sets, C candidates, H halves of layers (bits of a set).
"""

from __future__ import annotations

import math
from random import Random

import torch
from torch import Tensor

from spectrain.models.forward_plan import Sublayer
from spectrain.models.target import Target

from .sets import LayerSet, SetScorer, Text, is_valid, merge_halves, split_layer

NOISE = 1e-4  # variance of a score, relative to that of all scores
NUM_CANDIDATES = 256


class GaussianProcess:
    """A surrogate of scores over bit vectors, with k(x, y) = exp(-|x - y|^2 / (2 l^2)) and l^2 =
    H / 8.
    """

    def __init__(self, bits: Tensor, scores: Tensor) -> None:
        self.bits = bits
        self.mean = scores.mean()
        self.scale = scores.std(unbiased=False).clamp(min=1e-9)
        covariance = self.compare_bits(bits, bits) + NOISE * torch.eye(len(bits), dtype=bits.dtype)
        self.factor = torch.linalg.cholesky(covariance)
        self.weights = torch.cholesky_solve(
            ((scores - self.mean) / self.scale)[:, None], self.factor
        )[:, 0]

    def compare_bits(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the kernel [N, C] of bit vectors [N, H] and [C, H]."""
        return (-torch.cdist(first, second, p=1) / (2 * first.shape[1] / 8)).exp()

    def predict(self, bits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and the standard deviation [C] of the scores of bit vectors [C, H]."""
        cross = self.compare_bits(self.bits, bits)
        solved = torch.linalg.solve_triangular(self.factor, cross, upper=False)
        variance = (1 - solved.square().sum(0)).clamp(min=1e-12)
        return self.mean + self.scale * (cross.T @ self.weights), self.scale * variance.sqrt()

    def expected_improvement(self, bits: Tensor, best: float) -> Tensor:
        """Return E[max(score - best, 0)] [C]."""
        mean, deviation = self.predict(bits)
        z = (mean - best) / deviation
        density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
        return (mean - best) * torch.special.ndtr(z) + deviation * density


def search_halves(
    target: Target, texts: list[Text], depth: int, steps: int, seed: int = 0
) -> LayerSet:
    """Return the best of `steps` scored sets of halves, for chains of `depth` drafts."""
    scorer = SetScorer(target, texts, depth)
    random = Random(seed)
    halves = [half for layer in range(target.num_layers) for half in split_layer(layer)]
    starts = [frozenset(scorer.least_changing[:count]) for count in range(1, target.num_layers)]
    for start in starts[: max(1, steps // 4)]:
        scorer.score_set(merge_halves(start))
    while len(scorer.scores) < steps:
        scored = list(scorer.scores)
        bits = torch.stack([encode_set(skipped, halves) for skipped in scored])
        process = GaussianProcess(
            bits, torch.tensor([scorer.scores[skipped] for skipped in scored], dtype=torch.float64)
        )
        candidates = draw_candidates(scorer, halves, random)
        if not candidates:
            break
        encoded = torch.stack([encode_set(skipped, halves) for skipped in candidates])
        best = process.expected_improvement(encoded, scorer.scores[scorer.best]).argmax()
        scorer.score_set(candidates[int(best)])
    return scorer.best


def draw_candidates(scorer: SetScorer, halves: list[Sublayer], random: Random) -> list[LayerSet]:
    """Draw sets that were not scored: half of them at random, half with one to three halves
    changed from the best set.
    """
    best = {half for half in halves if half in scorer.best or half.layer in scorer.best}
    drawn: dict[LayerSet, None] = {}
    for number in range(NUM_CANDIDATES):
        if number % 2:
            changed = best ^ set(random.sample(halves, min(len(halves), random.randint(1, 3))))
        else:
            changed = set(random.sample(halves, random.randint(1, len(halves) - 1)))
        skipped = merge_halves(changed)
        if skipped and skipped not in scorer.scores and is_valid(skipped, scorer.target.num_layers):
            drawn[skipped] = None
    return list(drawn)


def encode_set(skipped: LayerSet, halves: list[Sublayer]) -> Tensor:
    """Return the bits [H] of a set: 1 where a half is skipped."""
    return torch.tensor(
        [float(half in skipped or half.layer in skipped) for half in halves], dtype=torch.float64
    )
