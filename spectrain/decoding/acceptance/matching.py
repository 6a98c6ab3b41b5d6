"""Rules that choose the target's token after every node beforehand and keep the path that agrees. Shapes: B batch, N nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.kernels import counter
from spectrain.kernels.counter import gumbel_noise, host_key
from spectrain.kernels.tree_verify import SamplingSpec, shape_logits, tree_greedy, tree_match
from spectrain.randomness import SAMPLE
from spectrain.trees.token_tree import AcceptedPath, TokenTree

from .base import AcceptanceRule, Siblings, make_nodes


class FixedChoice(AcceptanceRule):
    """A rule whose choice after every node is made before it looks at the drafts."""

    lossless = True
    on_device = True
    fixes_choice = True

    def acceptance_chances(self, siblings: Siblings, rate: Any = 1) -> list[Any]:
        """Of equal siblings the first is kept."""
        seen: set[int] = set()
        found = []
        for token in siblings.tokens:
            found.append(0 if token in seen else siblings.p[token])
            seen.add(token)
        return found


class Greedy(FixedChoice):
    """Keep what equals the target's most likely token; the output is the target's greedy output."""

    name = "greedy"

    def target_distribution(self, logits: Tensor) -> Tensor:
        return torch.zeros_like(logits, dtype=torch.float64).scatter(-1, logits.argmax(-1, keepdim=True), 1)

    def choose_tokens(self, logits: Tensor, sequence_ids: Tensor, positions: Tensor) -> Tensor:
        return logits.argmax(-1)

    def __call__(self, tree: TokenTree, logits: Tensor, sequence_ids: Tensor, positions: Tensor) -> AcceptedPath:
        return AcceptedPath(*tree_greedy(make_nodes(tree), logits))


class SamplingRule(AcceptanceRule):
    """Settings that every sampling rule shares. Temperature, top-k and top-p shape p for acceptance, residual and bonus alike.

    Each draw is keyed by seed, sequence and position, so a run repeats exactly, alone or in a batch.
    """

    is_random = True

    def __init__(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> None:
        if not temperature > 0:
            raise UserError(f"acceptance.temperature={temperature}: use more than 0, or acceptance=greedy")
        if top_k < 0:
            raise UserError(f"acceptance.top_k={top_k}: use 1 or more, or 0 for the whole vocabulary")
        if not 0 < top_p <= 1:
            raise UserError(f"acceptance.top_p={top_p}: use more than 0 and at most 1")
        self.temperature, self.top_k, self.top_p, self.seed = temperature, top_k, top_p, seed

    def shape_logits(self, logits: Tensor) -> Tensor:
        """Logits [..., V] after temperature, top-k and top-p."""
        return shape_logits(logits, self.temperature, self.top_k, self.top_p)

    def target_distribution(self, logits: Tensor) -> Tensor:
        return self.shape_logits(logits).double().softmax(-1)

    @property
    def sampling_settings(self) -> tuple[float, int, float, int]:
        return self.temperature, self.top_k, self.top_p, self.seed

    def matching_rule(self) -> AcceptanceRule:
        return Match(*self.sampling_settings)

    def choose_tokens(self, logits: Tensor, sequence_ids: Tensor, positions: Tensor) -> Tensor:
        noise = gumbel_noise(counter.make_key(SAMPLE, self.seed, sequence_ids[:, None], positions), logits.shape[-1])
        return (self.shape_logits(logits) + noise).argmax(-1)

    def make_draws(self, purpose: int, sequence_ids: Tensor, positions: Tensor) -> SamplingSpec:
        return SamplingSpec(host_key(purpose, self.seed), sequence_ids, positions, self.temperature, self.top_k, self.top_p)


class Match(FixedChoice, SamplingRule):
    """Sample-and-match: draw the target's token at every node, keep the path that agrees with the draws.

    Lossless for any tree that was built without looking at these draws, and the safe rule for top-k, re-ranked and pruned
    trees; for such children it accepts as often as the q = 1 rule of EAGLE-2. Drafted decoding emits the very tokens that
    autoregressive decoding draws with the same seed.
    """

    name = "match"

    def __call__(self, tree: TokenTree, logits: Tensor, sequence_ids: Tensor, positions: Tensor) -> AcceptedPath:
        return AcceptedPath(*tree_match(make_nodes(tree), logits, self.make_draws(SAMPLE, sequence_ids, positions)))


class OpenSampling(Match):
    """Sampling by whichever rule keeps more of this drafter, measured before decoding: sample-and-match or, where the drafter
    is unsure and the tree's children can be drawn, recursive rejection. The output has the target's distribution either way."""

    name = "sample"
    is_unresolved = True
