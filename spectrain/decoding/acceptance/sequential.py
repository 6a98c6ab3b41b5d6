"""Rules that decide node by node, for one sequence at a time. Shapes: B batch, N nodes, V
vocabulary.

Every random outcome comes from a `RandomSource`, so that a proof can enumerate all outcomes through
this code, with fractions in place of tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from spectrain.kernels.counter import fold_host, gumbel_noise, host_key, host_uniform
from spectrain.randomness import ACCEPT
from spectrain.trees.token_tree import AcceptedPath, TokenTree

from .base import Vector
from .matching import SamplingRule


class RandomSource(Protocol):
    """The source of a rule's random outcomes."""

    def flip_coin(self, chance: Any, node: int, number: int = 0) -> bool:
        """Return True with this probability. All coins that a decision may flip at one depth
        have distinct numbers.
        """

    def draw_token(self, weights: Vector, node: int) -> int:
        """Draw the token after a node from these probabilities."""


@dataclass(frozen=True)
class VerifiedTree:
    """The tree of one sequence; only visited nodes are normalized."""

    tokens: list[int]
    children: list[list[int]]  # of every node, in the order they were drawn
    p: Callable[[int], Vector]  # the target's distribution after a node
    # what the node's children, or the one of them that is drawn, were drawn from
    q: Callable[[int], Vector]
    without_replacement: bool = False
    # the logarithm of p up to a constant, where p itself may underflow
    scores: Callable[[int], Vector] | None = None


class SequentialRule(SamplingRule):
    """A rule that decides node by node, for one sequence at a time."""

    # Whether what a round decides may depend on coins at positions that the next round comes to
    # again.
    revisits_positions = True

    @abstractmethod
    def select_path(self, tree: VerifiedTree, random: RandomSource) -> tuple[list[int], int]:
        """Return the accepted nodes, the root first, and the token that follows them."""

    def __call__(
        self, tree: TokenTree, logits: Tensor, sequence_ids: Tensor, positions: Tensor
    ) -> AcceptedPath:
        if tree.tokens.shape[1] > 1:  # a root alone has no children to weigh
            self.check_children(tree.children, not self.chains_only or tree.is_chain)
        decisions = []
        for b, key in enumerate(sequence_ids.tolist()):
            text_key = host_key(ACCEPT, self.seed, key)
            own_positions = positions[b].tolist()
            # No two rounds of a text share the position of the root, which is the first node.
            round_key = (
                fold_host(text_key, own_positions[0]) if self.revisits_positions else text_key
            )
            random = _KeyedRandomSource(round_key, own_positions)
            decisions.append(self.select_path(self._make_verified_tree(tree, logits, b), random))
        width = max(len(path) for path, _ in decisions)
        device = logits.device
        padded = torch.tensor(
            [path + path[-1:] * (width - len(path)) for path, _ in decisions], device=device
        )
        counts = torch.tensor([len(path) for path, _ in decisions], device=device)
        return AcceptedPath(
            padded, counts, torch.tensor([bonus for _, bonus in decisions], device=device)
        )

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
            assert tree.q is not None, "a tree with drawn children has their distribution q"
            drawn = tree.q[b, node].double().cpu()
            ids = torch.arange(len(drawn)) if tree.draft_ids is None else tree.draft_ids.cpu()
            return drawn.new_zeros(logits.shape[-1]).scatter(0, ids, drawn)

        def scores(node: int) -> Tensor:
            return self.shape_logits(logits[b, node])

        return VerifiedTree(
            tree.tokens[b].tolist(), children, p, q, tree.children == "without_replacement", scores
        )


class _KeyedRandomSource:
    """The random source of decoding: each outcome has its own number, keyed by the position of its
    node.

    A rule that weighs whole paths, such as block verification, flips coins at positions that it
    then rejects. The next round comes to these positions again. What was decided depends on the
    coins of this round, so those of the next must be others: `key` is then the round's.
    """

    def __init__(self, key: int, positions: list[int]) -> None:
        self.key, self.positions = key, positions

    def flip_coin(self, chance: Any, node: int, number: int = 0) -> bool:
        return host_uniform(fold_host(self.key, self.positions[node]), number) < float(chance)

    def draw_token(self, weights: Vector, node: int) -> int:
        key = fold_host(fold_host(self.key, self.positions[node]), 1)
        noise = gumbel_noise(torch.tensor(key), len(weights))
        return int((torch.as_tensor(weights).log() + noise).argmax())


def acceptance_ratio(p: Any, q: Any) -> Any:
    """Return min(1, p / q), and 1 where both are 0."""
    return 1 if p >= q else p / q


def residual_rate(mass: Any, rate: Any) -> Any:
    """Return mass / (mass + 1 - rate), and 1 where the rate is 1 and p equals q."""
    total = mass + 1 - rate
    return mass / total if total > 0 else 1


def normalize_weights(weights: Vector, fallback: Vector) -> Vector:
    """Normalize weights to a distribution; return `fallback` where rounding left none."""
    total = weights.sum()
    return weights / total if total > 0 else fallback


def iterate_siblings(
    tokens: list[int], q: Vector, without_replacement: bool
) -> Iterator[tuple[int, Vector]]:
    """Yield the indices of siblings in the order in which they are judged, each with the
    distribution of its token.

    Siblings with q > 0 were drawn from q. The others are present whatever is drawn; each counts as
    drawn from a distribution that has all mass on it. They come last and are judged by what the
    drawn siblings leave of p.
    """
    drawn_indices = [index for index, token in enumerate(tokens) if q[token] > 0]
    remaining_q = q
    for index in drawn_indices:
        yield index, remaining_q
        if without_replacement:
            remaining_q = remove_token(remaining_q, tokens[index])
    for index in sorted({*range(len(tokens))} - {*drawn_indices}):
        point_mass = q * 0
        point_mass[tokens[index]] = 1
        yield index, point_mass


def remove_token(q: Vector, token: int) -> Vector:
    """Return q after `token` was drawn from it without replacement."""
    remaining = q + 0
    remaining[token] = 0
    return normalize_weights(remaining, remaining)
