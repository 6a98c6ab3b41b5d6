"""Matching rules: they fix the target's token after every node and accept the path that equals
it. Shapes: B batch, N nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.kernels import counter
from spectrain.kernels.counter import host_key
from spectrain.kernels.tree_verify import tree_greedy, tree_match
from spectrain.kernels.tree_walks import SamplingSpec, draw_tokens, shape_logits
from spectrain.randomness import SAMPLE
from spectrain.trees.token_tree import AcceptedPath, TokenTree

from .base import AcceptanceRule, Siblings, make_nodes

LEAST_TEMPERATURE = 1e-6
"""Logits divided by a much smaller one are infinite."""
LEAST_TOP_P = 1e-6
"""It keeps the most likely token alone, and what rounds to 0 would keep none."""


class FixedChoice(AcceptanceRule):
    """A rule that chooses the token after every node independently of the drafts."""

    lossless = True
    on_device = True
    fixes_choice = True

    def acceptance_chances(self, siblings: Siblings, rate: Any = 1) -> list[Any]:
        """Return the chances; of equal siblings only the first can be accepted."""
        earlier_tokens: set[int] = set()
        chances = []
        for token in siblings.tokens:
            chances.append(0 if token in earlier_tokens else siblings.p[token])
            earlier_tokens.add(token)
        return chances


class Greedy(FixedChoice):
    """Accepts tokens that equal the target's most likely one. The output is the target's greedy
    output.
    """

    name = "greedy"

    def target_distribution(self, logits: Tensor) -> Tensor:
        return torch.zeros_like(logits, dtype=torch.float64).scatter(
            -1, logits.argmax(-1, keepdim=True), 1
        )

    def choose_tokens(self, logits: Tensor, sequence_ids: Tensor, positions: Tensor) -> Tensor:
        return logits.argmax(-1)

    def __call__(
        self, tree: TokenTree, logits: Tensor, sequence_ids: Tensor, positions: Tensor
    ) -> AcceptedPath:
        return AcceptedPath(*tree_greedy(make_nodes(tree), logits))


@dataclass(eq=False)
class SamplingRule(AcceptanceRule):
    """The settings that all sampling rules share. Temperature, top-k and top-p shape p for
    acceptance, residual and bonus. A rule with further settings is a dataclass, too.

    Each draw is keyed by seed, sequence and position, so a run repeats exactly, alone or in a
    batch.
    """

    is_random = True

    # Temperature of the target's distribution; it must be above 0.
    temperature: float = 1.0
    # Number of most likely target tokens to sample from; 0 uses the whole vocabulary.
    top_k: int = 0
    # Share of the probability mass to sample from, the most likely tokens first; 1 uses all of it.
    top_p: float = 1.0
    # Seed of the random draws.
    seed: int = 0

    def __post_init__(self) -> None:
        if not LEAST_TEMPERATURE <= self.temperature < math.inf:
            raise UserError(
                f"acceptance.temperature={self.temperature}: use {LEAST_TEMPERATURE:g} or more, or "
                "acceptance=greedy"
            )
        if self.top_k < 0:
            raise UserError(
                f"acceptance.top_k={self.top_k}: use 1 or more, or 0 for the whole vocabulary"
            )
        if not LEAST_TOP_P <= self.top_p <= 1:
            raise UserError(f"acceptance.top_p={self.top_p}: use {LEAST_TOP_P:g} to 1")

    def shape_logits(self, logits: Tensor) -> Tensor:
        """Return logits [..., V] after temperature, top-k and top-p."""
        return shape_logits(logits, self.temperature, self.top_k, self.top_p)

    def target_distribution(self, logits: Tensor) -> Tensor:
        return self.shape_logits(logits).double().softmax(-1)

    @property
    def sampling_settings(self) -> tuple[float, int, float, int]:
        return self.temperature, self.top_k, self.top_p, self.seed

    def matching_rule(self) -> AcceptanceRule:
        return Match(*self.sampling_settings)

    def choose_tokens(self, logits: Tensor, sequence_ids: Tensor, positions: Tensor) -> Tensor:
        keys = counter.make_key(SAMPLE, self.seed, sequence_ids[:, None], positions)
        return draw_tokens(logits, keys, self.temperature, self.top_k, self.top_p)

    def make_draws(self, purpose: int, sequence_ids: Tensor, positions: Tensor) -> SamplingSpec:
        return SamplingSpec(
            host_key(purpose, self.seed),
            sequence_ids,
            positions,
            self.temperature,
            self.top_k,
            self.top_p,
        )


class Match(FixedChoice, SamplingRule):
    """Sample-and-match: draws the target's token at every node and accepts the path that equals the
    draws.

    Lossless for any tree that was built without looking at these draws, and the safe rule for
    top-k, re-ranked and pruned trees; for such children it accepts as often as the q = 1 rule of
    EAGLE-2. Drafted decoding emits the very tokens that autoregressive decoding draws with the same
    seed.
    """

    name = "match"

    def __call__(
        self, tree: TokenTree, logits: Tensor, sequence_ids: Tensor, positions: Tensor
    ) -> AcceptedPath:
        return AcceptedPath(
            *tree_match(make_nodes(tree), logits, self.make_draws(SAMPLE, sequence_ids, positions))
        )


class OpenSampling(Match):
    """Sampling by the rule that accepts more drafts, measured before decoding: sample-and-match or,
    where the drafter is unsure and children can be drawn, recursive rejection. The output has the
    target's distribution either way."""

    name = "sample"
    is_unresolved = True
