"""Copies in place of the drafter's tree where they promise more (HOWL, the hybrid of OWL, 2025).

Shapes: B batch, N nodes, P tokens of a round.
"""

from __future__ import annotations

from dataclasses import replace
from math import exp
from typing import Any

from spectrain.config.values import Count
from spectrain.copying.trie import Trie
from spectrain.drafters.capabilities import SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.hybrid import PATIENCE, DrafterWithCopies, build_partner
from spectrain.drafters.layers.copies import CopySource
from spectrain.models.target import Target
from spectrain.trees.base import TreeBuilder
from spectrain.trees.estimates import RunningMean
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree

# Drafted rounds of a text after which the drafter's tokens are known well enough to do without it.
FIRST_ROUNDS = 4


class Howl(DrafterWithCopies):
    """In each round and text, copies or the drafter's tree are verified, whichever promises more
    tokens.

    Copies promise 1 + the sum of their nodes' probabilities, which are learned while decoding as in
    drafter=hybrid; the drafter promises what its earlier trees emitted on average. Unlike
    drafter=hybrid, which merges both under one budget, a round verifies one of them. A round in
    which copies promise more in every text runs no step of the drafter. Where the drafter puts
    masks behind verified nodes, as OWL does, they stand behind copies too, so that it can draft in
    the next round.
    """

    saved = SavedFiles(inner=("inner",))

    def __init__(
        self,
        target: Target,
        # Drafter whose trees copies replace: a run folder, a drafter directory, or a choice, alone
        # or with settings.
        inner: str | dict[str, Any] = "owl",
        # Folder that spectrain data index wrote, to copy from; null copies from the current text
        # only.
        store: str | None = None,
        # Number of the drafter's last trees over which the tokens that they emitted are averaged.
        memory: Count = 32,
        # Largest number of final tokens of the text that are matched in the text itself.
        longest: int = 6,
        # Largest number of matching positions that are read per source.
        matches: int = 200,
        # Number of matches in the store below which shorter endings of the text are matched too.
        enough: int = 64,
    ) -> None:
        drafter, description = build_partner(inner, target, ", such as owl")
        super().__init__(
            drafter, CopySource.open(store, target.tokenizer, longest, matches, enough)
        )
        self.saved = replace(self.saved, settings={"inner": description})
        self.memory = memory
        # Tokens that a tree of the drafter emits, averaged over the last trees, and the number of
        # trees so far.
        self.mean_tokens = RunningMean()
        self.num_trees = 0
        # Of each text, whether this round verifies copies.
        self.uses_copies: list[bool] = []
        # Rounds of a text that verified copies.
        self.num_copied = 0

    def draft(self, context: Context) -> Draft:
        self.copying.propose_copies(context)
        copies = self._weigh_tries()
        active: list[bool] = context.active.tolist()
        self.uses_copies = [
            is_active and self._prefers_copies(trie, context.builder)
            for trie, is_active in zip(copies, active)
        ]
        self.num_copied += sum(self.uses_copies)
        copies_all = self.uses_copies == active
        if copies_all and self._can_skip(context):
            self.skippable.skip(context)
            return Draft(continuations=copies)
        draft = self.skippable.draft(context)
        if copies_all or draft.rollout is None:
            chosen = [trie if uses else Trie() for trie, uses in zip(copies, self.uses_copies)]
            return replace(draft, rollout=None, continuations=chosen)

        def choose_tries(tree: TokenTree) -> list[Trie]:
            drafted = make_tries(tree)
            return [
                trie if uses else other
                for trie, other, uses in zip(copies, drafted, self.uses_copies)
            ]

        return replace(draft, merge_copies=choose_tries)

    def _prefers_copies(self, trie: Trie, builder: TreeBuilder) -> bool:
        """Tell whether the copies that would be verified promise more tokens than the drafter's
        tree.
        """
        return (
            self.num_trees >= FIRST_ROUNDS
            and promised_tokens(trie, builder) > self.mean_tokens.value
        )

    def _can_skip(self, context: Context) -> bool:
        """Tell whether the drafter may read this round's tokens later; one that needs nodes in
        the tree may not.
        """
        num_unread = sum(features.tokens.shape[1] for features, _ in context.deferred)
        return (
            self.inner.capabilities.nestable
            and num_unread + 2 * (context.builder.depth + 1) <= PATIENCE
        )

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        for emitted, uses in zip(context.num_new.tolist(), self.uses_copies):
            if emitted and not uses:
                self.num_trees += 1
                self.mean_tokens.add(emitted, self.memory)
        super().commit(context, accepted)


def promised_tokens(trie: Trie, builder: TreeBuilder) -> float:
    """Return the expected tokens of a round that verifies this trie, the token after the drafts
    included.
    """
    nodes = (
        trie.heaviest_path(builder.depth)
        if builder.traits.is_chain
        else trie.best_nodes(builder.depth, builder.budget)
    )
    return 1.0 + sum(trie.weights[node] for node in nodes[1:])


def make_tries(tree: TokenTree) -> list[Trie]:
    """Return the drafter's nodes [B, N] of every text as a trie, weighted by its probability of
    the path to each.
    """
    assert tree.scores is not None
    tries = []
    for rows in zip(
        *(part.tolist() for part in (tree.tokens, tree.parents, tree.scores, tree.valid))
    ):
        trie = Trie()
        node_ids = {0: 0}
        trie.weights[0] = 1.0
        for node, (token, parent, score, is_valid) in list(enumerate(zip(*rows)))[1:]:
            if is_valid:
                node_ids[node] = trie.ensure_child(node_ids[parent], token)
                trie.weights[node_ids[node]] = exp(min(0.0, score))
        tries.append(trie)
    return tries
