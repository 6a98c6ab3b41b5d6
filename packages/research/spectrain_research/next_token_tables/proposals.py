"""Drafters that look the next token up in a table, merged with copies of the text."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from math import log
from typing import NamedTuple

import torch

from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import Capabilities
from spectrain.drafters.context import Context
from spectrain.drafters.layers.copies import CopySource
from spectrain.trees.rollout import Draft

MIN_PROB = 1e-9


class TableTree(NamedTuple):
    """The nodes that a table proposes below a root, the root first, with the logarithm of the
    probability of each path.
    """

    tokens: list[int]
    parents: list[int]
    scores: list[float]

    @classmethod
    def from_root(cls, root: int) -> TableTree:
        return cls([root], [-1], [0.0])

    def add_node(self, parent: int, token: int, probability: float) -> int:
        """Add a child of a node and return its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(self.scores[parent] + log(max(probability, MIN_PROB)))
        return len(self.tokens) - 1


class TableDrafter(Drafter):
    """Merges the tree of a table with copies, weighted by acceptance probabilities that are learned
    while decoding.

    The table is one more source of copies: its nodes are judged by what followed, by the share that
    the table gives them.
    """

    capabilities = Capabilities(is_copier=True, has_no_q=True)

    def __init__(self, copying: CopySource, copies: bool) -> None:
        super().__init__()
        self.copying = copying
        self.capabilities = replace(self.capabilities, datastore=copying.store)
        # Whether copies of the text and of the store join the table's nodes.
        self.copies = copies

    def draft(self, context: Context) -> Draft:
        active = context.active.tolist()
        if not self.copies:
            context = replace(context, active=torch.zeros_like(context.active))
        tries = []
        proposals = self.copying.propose_copies(context)
        for proposal, row, is_active in zip(proposals, self.copying.texts.rows, active):
            if is_active:
                tree = self.propose_tree(row.tokens, context.builder.depth, context.builder.budget)
                proposal.add_draft(*tree, [True] * len(tree.tokens))
            tries.append(proposal.weigh_trie(self.copying.estimator))
        return Draft(continuations=tries)

    @abstractmethod
    def propose_tree(self, text: list[int], depth: int, budget: int) -> TableTree:
        """Return the table's nodes below the end of a text."""
