"""Prompt lookup (Saxena, 2023): propose what followed the last few tokens when they were seen before. Needs no training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..features import Batch
from ..shapes import TreeBuilder
from ..tree import TokenTree
from .base import Drafter, Losses

if TYPE_CHECKING:
    from ..decode import Context
    from ..target import Target


class Ngram(Drafter):
    """A chain copied from the latest earlier occurrence of the longest matching n-gram, `longest` to `shortest` tokens."""

    def __init__(self, target: Target, longest: int = 3, shortest: int = 1) -> None:
        super().__init__()
        self.longest, self.shortest = longest, shortest

    def loss(self, batch: Batch, target: Target) -> Losses:
        raise TypeError("the n-gram drafter has nothing to train: score it with spectrain eval drafter=ngram")

    def propose(self, context: Context, budget: TreeBuilder) -> TokenTree:
        rows = []
        lengths = (context.cache.lengths + 1).tolist()
        for tokens, length in zip(context.tokens.tolist(), lengths):
            rows.append([tokens[length - 1], *self._lookup(tokens[:length], min(budget.depth, budget.budget - 1))])
        width = max(len(row) for row in rows)
        device = context.tokens.device
        padded = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        valid = torch.tensor([[n < len(row) for n in range(width)] for row in rows], device=device)
        tree = TokenTree.chain(padded)
        return TokenTree(tree.tokens, tree.parents, valid, tree.emitted)

    def _lookup(self, tokens: list[int], depth: int) -> list[int]:
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            suffix = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == suffix:
                    return tokens[start + size : start + size + depth]
        return []
