"""Drafts of blockwise parallel decoding, refined by an n-gram model (Kim et al., 2024, arXiv
2404.09221).

Shapes: B batch, D depths, M tokens a depth, V draft vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from spectrain.config.values import Count, NotNegative, Width
from spectrain.copying.trie import Trie
from spectrain.data.datastore import Datastore
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.trees.rollout import DepthRollout, Draft
from spectrain_research.shared.nested_drafter import NestedDrafter

from .ngrams import NgramModel, find_best_paths


class Blockwise(NestedDrafter):
    """The `paths` best paths of the lattice that a drafter of marginals spans, by its q and an
    n-gram model, as one tree.

    The drafter gives log q_d of every depth at once, without reading what it drafts, so its most
    likely tokens need not fit together. A path's score is sum_d log q_d(x_d) + weight log S(x_d |
    the n - 1 tokens before), with S from counts of the store and of the text so far. The best paths
    are merged where they begin alike. A node weighs the share exp(score) of the paths through it.
    """

    def __init__(
        self,
        target: Target,
        # Drafter to refine: a run folder, a drafter directory, or a choice; one that drafts all
        # depths in one pass.
        inner: str | dict[str, Any] = "medusa",
        # Folder that spectrain data index wrote, whose n-grams are counted; null counts those of
        # the current text alone.
        store: str | None = None,
        # Length of the n-grams in tokens.
        order: Literal[2, 3] = 2,
        # Weight of the n-gram model's log-probability; 0 takes the drafter's alone.
        weight: NotNegative = 0.5,
        # Number of most likely tokens of every depth that paths go through.
        width: Width = 8,
        # Number of paths of a tree.
        paths: Count = 4,
    ) -> None:
        super().__init__(target, inner)
        self.order = order
        self.weight = weight
        self.width = width
        self.num_paths = paths
        self.vocab_size = target.head.vocab_size
        datastore = None if store is None else Datastore(store, target.tokenizer)
        self.capabilities = replace(self.capabilities, datastore=datastore)
        self.stored = (
            None if datastore is None else NgramModel(datastore.tokens, order, self.vocab_size)
        )

    def draft(self, context: Context) -> Draft:
        rollout = self.inner.draft(context).rollout
        if rollout is None:
            return Draft()
        if not isinstance(rollout, DepthRollout):
            raise UserError(
                "drafter.inner: its drafts depend on each other already; use a drafter that "
                "drafts all depths in one pass, such as medusa, cerberus or dflash"
            )
        depth = rollout.limit_depth(context.builder.depth)
        top = collect_marginals(rollout, depth).topk(self.width, dim=-1)
        ids = rollout.to_target_ids(top.indices).tolist()
        lattices = [
            [list(zip(*columns)) for columns in zip(*row)] for row in zip(ids, top.values.tolist())
        ]
        lengths = (context.lengths + 1).tolist()
        texts = context.tokens.tolist()
        return Draft(
            continuations=[
                self.refine(lattice, text[:n]) for lattice, text, n in zip(lattices, texts, lengths)
            ]
        )

    def refine(self, lattice: list[list[tuple[int, float]]], text: list[int]) -> Trie:
        """Return the trie of the best paths of a lattice after a text."""
        model = self.stored or NgramModel(np.asarray(text), self.order, self.vocab_size)
        best_paths = find_best_paths(lattice, text, model, self.weight, self.num_paths)
        trie = Trie()
        best = best_paths[0][0]
        for score, path in best_paths:
            trie.add_continuation(path, math.exp(score - best))
        return trie


def collect_marginals(rollout: DepthRollout, depth: int) -> Tensor:
    """Return log q [B, D, V] of every depth of a rollout that reads no drafted token."""
    log_q = [rollout.start()]
    zeros = torch.zeros_like(rollout.root)[:, None]
    for level in range(1, depth):
        log_q.append(rollout.extend(rollout.root[:, None], zeros + level - 1))
    return torch.cat(log_q, dim=1)
