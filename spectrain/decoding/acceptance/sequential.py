"""Rules that decide node by node, for one sequence at a time. Shapes: B batch, N nodes, V vocabulary.

Every random outcome comes from a `RandomSource`, so that a proof can enumerate all outcomes through this code, with fractions
in place of tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from spectrain.kernels.counter import fold_key, gumbel_noise, host_key, uniform_noise
from spectrain.randomness import ACCEPT
from spectrain.trees.token_tree import AcceptedPath, TokenTree

from .base import Vector
from .matching import SamplingRule


class RandomSource(Protocol):
    """The source of a rule's random outcomes."""

    def flip_coin(self, chance: Any, node: int, number: int = 0) -> bool:
        """Return True with this probability. All coins that a decision may flip at one depth have distinct numbers."""

    def draw_token(self, weights: Vector, node: int) -> int:
        """Draw the token after a node from these probabilities."""


@dataclass(frozen=True)
class VerifiedTree:
    """The tree of one sequence; only visited nodes are normalized."""

    tokens: list[int]
    children: list[list[int]]  # of every node, in the order they were drawn
    p: Callable[[int], Vector]  # the target's distribution after a node
    q: Callable[[int], Vector]  # what the node's children, or the one of them that is drawn, were drawn from
    without_replacement: bool = False
    scores: Callable[[int], Vector] | None = None  # the logarithm of p up to a constant, where p itself may underflow


class SequentialRule(SamplingRule):
    """A rule that decides node by node, for one sequence at a time."""

    @abstractmethod
    def select_path(self, tree: VerifiedTree, random: RandomSource) -> tuple[list[int], int]:
        """Return the accepted nodes, the root first, and the token that follows them."""

    def __call__(self, tree: TokenTree, logits: Tensor, sequence_ids: Tensor, positions: Tensor) -> AcceptedPath:
        if tree.tokens.shape[1] > 1:  # a root alone has no children to weigh
            self.check_children(tree.children, not self.chains_only or tree.is_chain)
        verdicts = []
        for b, key in enumerate(sequence_ids.tolist()):
            dice = _KeyedRandomSource(fold_key(host_key(ACCEPT, self.seed), key), positions[b].tolist())
            verdicts.append(self.select_path(self._make_verified_tree(tree, logits, b), dice))
        width = max(len(path) for path, _ in verdicts)
        device = logits.device
        padded = torch.tensor([path + path[-1:] * (width - len(path)) for path, _ in verdicts], device=device)
        counts = torch.tensor([len(path) for path, _ in verdicts], device=device)
        return AcceptedPath(padded, counts, torch.tensor([bonus for _, bonus in verdicts], device=device))

    def _make_verified_tree(self, tree: TokenTree, logits: Tensor, b: int) -> VerifiedTree:
        children: list[list[int]] = [[] for _ in range(tree.tokens.shape[1])]
        real = (tree.valid[b] & tree.can_emit[b]).tolist()
        for node, parent in enumerate(tree.parents[b].tolist()):
            if parent >= 0 and real[node]:
                children[parent].append(node)

        @cache
        def p(node: int) -> Tensor:
            return self.target_distribution(logits[b, node]).cpu()

        @cache
        def q(node: int) -> Tensor:
            assert tree.q is not None, "a tree with drawn children says what they were drawn from"
            drawn = tree.q[b, node].double().cpu()
            ids = torch.arange(len(drawn)) if tree.draft_ids is None else tree.draft_ids.cpu()
            return drawn.new_zeros(logits.shape[-1]).scatter(0, ids, drawn)

        def scores(node: int) -> Tensor:
            return self.shape_logits(logits[b, node])

        return VerifiedTree(tree.tokens[b].tolist(), children, p, q, tree.children == "without_replacement", scores)


class _KeyedRandomSource:
    """Dice for decoding: each outcome has its own number, by the position of its node."""

    def __init__(self, key: Tensor, positions: list[int]) -> None:
        self.key, self.positions = key, positions

    def flip_coin(self, chance: Any, node: int, number: int = 0) -> bool:
        return float(uniform_noise(fold_key(self.key, self.positions[node]), torch.tensor(number))) < float(chance)

    def draw_token(self, weights: Vector, node: int) -> int:
        return int((weights.log() + gumbel_noise(fold_key(fold_key(self.key, self.positions[node]), 1), len(weights))).argmax())


def acceptance_ratio(p: Any, q: Any) -> Any:
    """Return min(1, p / q), and 1 where both are 0."""
    return 1 if p >= q else p / q


def residual_rate(mass: Any, rate: Any) -> Any:
    """Return mass / (mass + 1 - rate), and 1 where the rate is 1 and p equals q."""
    total = mass + 1 - rate
    return mass / total if total > 0 else 1


def normalize_weights(weights: Vector, fallback: Vector) -> Vector:
    """The weights as a distribution; `otherwise` where rounding left none."""
    total = weights.sum()
    return weights / total if total > 0 else fallback


def iterate_siblings(tokens: list[int], q: Vector, without_replacement: bool) -> Iterator[tuple[int, Vector]]:
    """The places of siblings in the order in which they are judged, each with what its token was drawn from.

    Those that q offers were drawn from it. The others are there whatever is drawn, each as if drawn from a distribution that
    has nothing else, and come last: what the drawn ones leave of p is theirs.
    """
    drawn = [place for place, token in enumerate(tokens) if q[token] > 0]
    left = q
    for place in drawn:
        yield place, left
        if without_replacement:
            left = remove_token(left, tokens[place])
    for place in sorted({*range(len(tokens))} - {*drawn}):
        alone = q * 0
        alone[tokens[place]] = 1
        yield place, alone


def remove_token(q: Vector, token: int) -> Vector:
    """Return q after `token` was drawn from it without replacement."""
    left = q + 0
    left[token] = 0
    return normalize_weights(left, left)
