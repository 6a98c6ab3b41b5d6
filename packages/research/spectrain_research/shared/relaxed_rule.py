"""Greedy acceptance that forgives some drafts. Shapes: B batch, N nodes, V vocabulary."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.acceptance.base import AcceptanceRule, Siblings
from spectrain.decoding.acceptance.matching import Greedy
from spectrain.models.features import Features
from spectrain.trees.token_tree import AcceptedPath, TokenTree


class LossyGreedyRule(AcceptanceRule):
    """A greedy rule that accepts further drafts. The token after the last accepted node is the
    target's most likely one.
    """

    lossless = False

    def __init__(self) -> None:
        self.greedy = Greedy()

    def __call__(
        self, tree: TokenTree, logits: Tensor, sequence_ids: Tensor, positions: Tensor
    ) -> AcceptedPath:
        return self.accept(
            tree, Features(tree.tokens, (), logits[..., None, :0], logits), sequence_ids, positions
        )

    def choose_tokens(self, logits: Tensor, sequence_ids: Tensor, positions: Tensor) -> Tensor:
        return self.greedy.choose_tokens(logits, sequence_ids, positions)

    def target_distribution(self, logits: Tensor) -> Tensor:
        return self.greedy.target_distribution(logits)

    def acceptance_chances(self, siblings: Siblings, rate: Any = 1) -> list[Any]:
        """Return the chances of the greedy rule, which are lower bounds: acceptance depends on
        more than the siblings.
        """
        return self.greedy.acceptance_chances(siblings, rate)

    def matching_rule(self) -> AcceptanceRule:
        return self.greedy


class RelaxedRule(LossyGreedyRule):
    """Accepts the child that equals the target's most likely token, else the child with the largest
    score above 0.

    The most likely token after the last accepted node follows. Where no other draft is forgiven,
    the output is the greedy one.
    """

    on_device = True

    @abstractmethod
    def forgiveness_scores(self, tree: TokenTree, features: Features, is_correct: Tensor) -> Tensor:
        """Return scores [B, N] of nodes; at 0 or below a node is not forgiven.

        `is_correct` [B, N] marks nodes that equal the most likely token after their parent; their
        scores are not used.
        """

    def accept(
        self, tree: TokenTree, features: Features, sequence_ids: Tensor, positions: Tensor
    ) -> AcceptedPath:
        if tree.tokens.shape[1] > 1:
            self.check_children(tree.children, not self.chains_only or tree.is_chain)
        assert features.logits is not None
        choice = self.choose_tokens(features.logits, sequence_ids, positions)
        is_real = tree.valid & tree.can_emit
        parents = tree.parents.clamp(min=0)
        is_correct = is_real & (tree.parents >= 0) & (tree.tokens == choice.gather(1, parents))
        scores = (
            self.forgiveness_scores(tree, features, is_correct)
            .masked_fill(~is_real, 0)
            .masked_fill(is_correct, math.inf)
        )
        path = [torch.zeros_like(choice[:, 0])]
        is_open = torch.ones_like(choice[:, 0], dtype=torch.bool)
        counts = torch.ones_like(choice[:, 0])
        for _ in range(tree.max_path_nodes - 1):
            best, child = scores.masked_fill(tree.parents != path[-1][:, None], 0).max(1)
            is_open = is_open & (best > 0)
            path.append(torch.where(is_open, child, path[-1]))
            counts = counts + is_open
        return AcceptedPath(torch.stack(path, 1), counts, choice.gather(1, path[-1][:, None])[:, 0])
