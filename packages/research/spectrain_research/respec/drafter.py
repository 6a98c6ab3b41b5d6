"""Retrieval only where it is likely to be right (ReSpec, 2025, arXiv 2511.01282). Shapes: B
batch, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from spectrain.config.values import NotNegative, Share
from spectrain.copying.estimates import Proposal
from spectrain.copying.trie import Trie
from spectrain.drafters.capabilities import SavedFiles
from spectrain.drafters.context import Context
from spectrain.drafters.hybrid import DrafterWithCopies
from spectrain.drafters.layers.copies import CopySource
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import TokenTree
from spectrain_research.shared.nested_rollout import NestedRollout
from spectrain_research.shared.nesting import build_nestable

from .relaxed import CopiedTree, mark_copies


class RootEntropyRollout(NestedRollout):
    """Another rollout, and the entropy [B], in nats, of its distribution after the root."""

    root_entropy: Tensor | None = None

    def start(self) -> Tensor:
        log_q = super().start()
        self.root_entropy = torch.special.entr(log_q[:, 0].float().softmax(-1)).sum(-1)
        return log_q


class ReSpec(DrafterWithCopies):
    """Combines a drafter with copies in the rounds in which copies are likely to be right.

    The paper retrieves where the context is predictable, by the entropy of the drafter's
    distribution, and ranks candidates by feedback of earlier rounds. Here copies of a text are
    looked up where the entropy after its root is below `entropy`, and join the tree where the
    surest of them has at least the probability `chance`; the probability is learned while decoding,
    as in drafter=hybrid. Everywhere else the tree is the drafter's alone. Its trees say which nodes
    are copies, so that acceptance=relaxed_copies can judge these alone less strictly, as the paper
    does; all other rules treat all nodes alike.
    """

    saved = SavedFiles(inner=("inner",))

    def __init__(
        self,
        target: Target,
        # Drafter to combine with copies: a run folder, a drafter directory, or a choice, alone or
        # with settings.
        inner: str | dict[str, Any] = "eagle3",
        # Folder that spectrain data index wrote, to copy from; null copies from the current text
        # only.
        store: str | None = None,
        # Entropy in nats of the drafter's next token below which copies are looked up; null always
        # looks them up. Drafters that are less sure need a larger one: 2 hardly ever opens for
        # drafters of target=tiny.
        entropy: NotNegative | None = 5.0,
        # Smallest estimated probability of the surest copied token with which copies join the tree;
        # 0 always lets them join.
        chance: Share = 0.0,
        # Largest number of final tokens of the text that are matched in the text itself.
        longest: int = 6,
        # Largest number of matching positions that are read per source.
        matches: int = 200,
        # Number of matches in the store below which shorter endings of the text are matched too.
        enough: int = 64,
    ) -> None:
        drafter, description = build_nestable(inner, "inner", target)
        if drafter.capabilities.is_copier:
            raise UserError(
                f"drafter.inner={description['choice']}: it copies and has no entropy; use a "
                "drafter such as eagle3"
            )
        super().__init__(
            drafter, CopySource.open(store, target.tokenizer, longest, matches, enough)
        )
        self.saved = replace(self.saved, settings={"inner": description})
        self.max_entropy = inf if entropy is None else entropy
        self.min_chance = chance
        # Rows of rounds in which copies could join, were looked up and joined.
        self.num_rows = self.num_lookups = self.num_joined = 0
        # Of each text, this round's merged proposal and the number of its first entries that are
        # copies.
        self.merged: list[Proposal] = []
        self.num_copied: list[int] = []

    def draft(self, context: Context) -> Draft:
        self.merged = []
        self.num_copied = []
        draft = self.skippable.draft(context)
        # The drafter cannot draft in every round.
        if draft.rollout is None:
            self.copying.propose_copies(context)
            return replace(
                draft, continuations=self._weigh_tries(), add_mask_nodes=self._mark_copies
            )
        rollout = RootEntropyRollout(draft.rollout)

        def merge_copies(tree: TokenTree) -> list[Trie]:
            assert rollout.root_entropy is not None
            wants_copies = context.active & (rollout.root_entropy < self.max_entropy)
            self.copying.propose_copies(replace(context, active=wants_copies))
            self._count_rows(context.active, wants_copies)
            return self._merge_tries(tree)

        return replace(
            draft, rollout=rollout, merge_copies=merge_copies, add_mask_nodes=self._mark_copies
        )

    def _count_rows(self, active: Tensor, wants_copies: Tensor) -> None:
        self.num_rows += int(active.sum())
        self.num_lookups += int(wants_copies.sum())

    def _merge_tries(self, tree: TokenTree) -> list[Trie]:
        """Return the tries of every text: the drafter's nodes [B, N], and copies where they join.

        Copies that do not join are judged by what follows all the same, so that their probability
        stays up to date.
        """
        assert tree.scores is not None
        nodes = (tree.tokens, tree.parents, tree.scores, tree.valid)
        tries = []
        for copies, *row in zip(self.copying.proposals, *(part.tolist() for part in nodes)):
            joins = self._surest_chance(copies) >= self.min_chance
            self.num_joined += bool(copies.entries) and joins
            proposal = copies if joins else Proposal()
            self.num_copied.append(len(proposal.entries))
            self.merged.append(proposal)
            proposal.add_draft(*row)
            tries.append(proposal.weigh_trie(self.copying.estimator))
        return tries

    def _mark_copies(self, tree: TokenTree) -> CopiedTree:
        """Mark the copied nodes of this round's tree."""
        if not self.merged:
            # The drafter drafted nothing.
            return mark_copies(
                tree,
                self.copying.proposals,
                [len(copies.entries) for copies in self.copying.proposals],
            )
        return mark_copies(tree, self.merged, self.num_copied)

    def _surest_chance(self, copies: Proposal) -> float:
        """Return the largest estimated probability of a copied token right after the root, 0
        without copies.
        """
        if not copies.entries:
            return 0.0
        is_first = [copies.trie.parents[node] == 0 for node in copies.nodes.tolist()]
        return float(max(self.copying.estimator(copies.estimates)[is_first], default=0.0))
