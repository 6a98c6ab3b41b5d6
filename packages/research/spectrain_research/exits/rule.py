"""The rule that accepts every draft: what early exits say stays without verification. NOT
lossless.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.acceptance.base import AcceptanceRule, Siblings
from spectrain.decoding.acceptance.matching import Greedy
from spectrain.trees.token_tree import AcceptedPath, TokenTree


class Unverified(AcceptanceRule):
    """Accepts the whole chain; the target's most likely token follows. NOT lossless.

    The target's forward over the chain computes the keys that later tokens need, and the token
    after the chain.
    """

    name = "unverified"
    lossless = False
    chains_only = True
    on_device = True

    def __init__(self) -> None:
        self.greedy = Greedy()

    def __call__(
        self, tree: TokenTree, logits: Tensor, sequence_ids: Tensor, positions: Tensor
    ) -> AcceptedPath:
        if tree.tokens.shape[1] > 1:
            self.check_children(tree.children, tree.is_chain)
        counts = (tree.valid & tree.can_emit).sum(1)
        steps = torch.arange(tree.tokens.shape[1], device=counts.device)
        path = torch.minimum(steps, counts[:, None] - 1)
        choice = self.choose_tokens(logits, sequence_ids, positions)
        return AcceptedPath(path, counts, choice.gather(1, counts[:, None] - 1)[:, 0])

    def choose_tokens(self, logits: Tensor, sequence_ids: Tensor, positions: Tensor) -> Tensor:
        return self.greedy.choose_tokens(logits, sequence_ids, positions)

    def target_distribution(self, logits: Tensor) -> Tensor:
        return self.greedy.target_distribution(logits)

    def acceptance_chances(self, siblings: Siblings, rate: Any = 1) -> list[Any]:
        """Return 1: the only sibling is accepted."""
        return [1 for _ in siblings.tokens]

    def matching_rule(self) -> AcceptanceRule:
        return self.greedy
