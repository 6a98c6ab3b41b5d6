"""Multi-step speculative sampling (SpecInfer, Miao et al., 2024, algorithm 2): a node has draws
from several q's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from spectrain.decoding.acceptance.base import Vector
from spectrain.decoding.acceptance.rejection import RecursiveRejection
from spectrain.decoding.acceptance.sequential import (
    RandomSource,
    SequentialRule,
    VerifiedTree,
    acceptance_ratio,
    normalize_weights,
)
from spectrain.trees.token_tree import AcceptedPath, TokenTree

from .tree import UnionTree


@dataclass(frozen=True)
class DrawnTree(VerifiedTree):
    """The tree of one sequence, with the draws after each node: a child and the distribution
    that its token was drawn from.
    """

    draws: Callable[[int], list[tuple[int, Vector]]] = lambda node: []


class MultiStepSampling(RecursiveRejection):
    """Recursive rejection over several q's: of the draws after a node in turn, keep x with
    probability min(1, P(x) / q_k(x)) for the drafter k that drew it, else P becomes the normalised
    max(P - q_k, 0). A token that two drafters drew is judged twice. Trees of a single drafter are
    judged as by `recursive`."""

    name = "specinfer"
    children = ("sampled",)
    on_device = False

    def __call__(
        self, tree: TokenTree, logits: Tensor, sequence_ids: Tensor, positions: Tensor
    ) -> AcceptedPath:
        if not isinstance(tree, UnionTree):
            return super().__call__(tree, logits, sequence_ids, positions)
        return SequentialRule.__call__(self, tree, logits, sequence_ids, positions)

    def _make_verified_tree(self, tree: TokenTree, logits: Tensor, b: int) -> VerifiedTree:
        verified = super()._make_verified_tree(tree, logits, b)
        assert isinstance(tree, UnionTree)
        draws = tree.draws[b]
        drafter_q = tree.drafter_q

        def draws_after(node: int) -> list[tuple[int, Vector]]:
            return [
                (child, drafter_q[drafter][b, node].double().cpu())
                for child, drafter in draws.get(node, [])
            ]

        return DrawnTree(
            verified.tokens, verified.children, verified.p, verified.q, draws=draws_after
        )

    def select_path(self, tree: VerifiedTree, random: RandomSource) -> tuple[list[int], int]:
        if not isinstance(tree, DrawnTree):
            return super().select_path(tree, random)
        path = [0]
        while True:
            node = path[-1]
            p = tree.p(node)
            for number, (child, q) in enumerate(tree.draws(node)):
                token = tree.tokens[child]
                if random.flip_coin(acceptance_ratio(p[token], q[token]), node, number):
                    path.append(child)
                    break
                p = normalize_weights((p - q).clip(0), p)
            else:
                return path, random.draw_token(p, node)
