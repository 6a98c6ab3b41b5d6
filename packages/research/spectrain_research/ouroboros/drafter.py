"""Ouroboros (Zhao et al., 2024, arXiv 2402.13720): drafts are lengthened by phrases, which rejected
drafts provide.

Shapes: B batch, N nodes, M added nodes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from spectrain.config.values import Count, Steps
from spectrain.copying.trie import Trie
from spectrain.drafters.context import Context
from spectrain.drafters.layers.inner_drafters import InnerCost
from spectrain.models.features import Features
from spectrain.models.target import Target
from spectrain.trees.base import TreeBuilder
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain_research.shared.nested_drafter import NestedDrafter
from spectrain_research.shared.phrase_pool import PhrasePool

from .phrases import find_agreeing_runs

PHRASES_PER_TOKEN = 16  # phrases that the pool retains for a first token


class OuroborosCost(InnerCost):
    """The cost of the inner drafter; phrases cost nodes of verification only."""

    def extra_nodes(self, builder: TreeBuilder) -> int:
        return super().extra_nodes(builder) + int(self.drafter.max_added)


class Ouroboros(NestedDrafter):
    """Hangs up to `phrases` phrases behind the last node of the draft of `inner`, whose token is
    their first one.

    The pool of a text holds the runs of two and more rejected tokens that agree with the target's
    predictions at the tokens before them and, with `phrases_from_text`, the n-grams of the prompt
    and the answer. In a tree the phrases continue the likeliest leaves that have some. The paper's
    small model also drafts phrase by phrase; here `inner` drafts as it does alone.
    """

    def __init__(
        self,
        target: Target,
        # Drafter whose drafts are lengthened: a run folder, a drafter directory, or a choice, alone
        # or with settings.
        inner: str | dict[str, Any] = "causal",
        # Largest number of phrases behind a draft.
        phrases: Count = 3,
        # Largest number of tokens of a phrase, including the first one, which is the last token of
        # the draft.
        length: Steps = 4,
        # Whether the pool also has the n-grams of the prompt and of the answer.
        phrases_from_text: bool = True,
    ) -> None:
        super().__init__(target, inner)
        # It reads the logits of its verification.
        self.capabilities = replace(
            self.capabilities, drafts_from_features=False, cost=OuroborosCost
        )
        self.num_phrases = phrases
        self.length = max(2, length)
        self.phrases_from_text = phrases_from_text
        self.pools: list[PhrasePool] = []
        # The tree of this round, the target's predictions at its nodes, and the number of the inner
        # drafter's nodes.
        self.tree: TokenTree | None = None
        self.answers: list[list[int]] = []
        self.num_inner = 0
        # Added nodes that were verified and that were accepted, over all rounds.
        self.num_added = self.num_hits = 0

    @property
    def max_added(self) -> int:
        """The largest number of nodes that phrases add to a tree."""
        return self.num_phrases * (self.length - 1)

    def draft(self, context: Context) -> Draft:
        if context.begins:
            self.pools = [PhrasePool(self.length, PHRASES_PER_TOKEN) for _ in context.num_new]
        if self.phrases_from_text:
            self._read_texts(context)
        return replace(self.inner.draft(context), add_mask_nodes=self._append_phrases)

    def _read_texts(self, context: Context) -> None:
        """Add the phrases of committed tokens; in the first round those of the prompts, with
        their roots.
        """
        ends = (context.lengths + 1).tolist()
        counts = ends if context.begins else context.num_new.tolist()
        for pool, tokens, end, count in zip(self.pools, context.tokens.tolist(), ends, counts):
            pool.add_text(tokens[end - count : end])

    def _append_phrases(self, tree: TokenTree) -> TokenTree:
        """Return the tree with phrases behind its likeliest leaves: [B, N + M]."""
        self.num_inner = tree.tokens.shape[1]
        added = [self._find_branches(tree, row) for row in range(len(tree.tokens))]
        width = max(len(tokens) for tokens, _ in added)
        if not width:
            return tree
        columns = []
        for new_tokens, new_parents in added:
            padding = [0] * (width - len(new_tokens))
            is_real = [True] * len(new_tokens) + [False] * len(padding)
            columns.append(([*new_tokens, *padding], [*new_parents, *padding], is_real))
        tokens, parents, valid = (
            torch.tensor(part, device=tree.tokens.device) for part in zip(*columns)
        )
        return TokenTree(
            torch.cat([tree.tokens, tokens], dim=1),
            torch.cat([tree.parents, parents], dim=1),
            torch.cat([tree.valid, valid], dim=1),
            torch.cat([tree.can_emit, torch.ones_like(valid)], dim=1),
        )

    def _find_branches(self, tree: TokenTree, row: int) -> tuple[list[int], list[int]]:
        """Return the tokens and parents of the nodes that phrases add to a row."""
        tokens, parents, valid = (
            part[row].tolist() for part in (tree.tokens, tree.parents, tree.valid)
        )
        scores = tree.depths[row].tolist() if tree.scores is None else tree.scores[row].tolist()
        inner_parents = {parent for parent, is_valid in zip(parents, valid) if is_valid}
        leaves = [
            node for node, is_valid in enumerate(valid) if is_valid and node not in inner_parents
        ]
        new_tokens: list[int] = []
        new_parents: list[int] = []
        num_left = self.num_phrases
        for leaf in sorted(leaves, key=scores.__getitem__, reverse=True):
            continuations = self.pools[row].find_continuations(tokens[leaf], num_left)
            branches = Trie.from_continuations(continuations)
            start = len(tokens) + len(new_tokens)
            new_tokens += branches.tokens[1:]
            new_parents += [
                leaf if parent == 0 else start + parent - 1 for parent in branches.parents[1:]
            ]
            num_left -= len(continuations)
            if not num_left:
                break
        return new_tokens, new_parents

    def verify(self, context: Context, tree: TokenTree) -> Features:
        features = super().verify(context, tree)
        assert features.logits is not None
        self.tree = tree
        self.answers = features.logits.argmax(-1).tolist()
        return features

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        super().commit(context, accepted)
        assert self.tree is not None
        columns = (
            self.tree.tokens,
            self.tree.parents,
            self.tree.valid,
            accepted.path,
            accepted.counts,
        )
        for row, (tokens, parents, valid, path, count) in enumerate(
            zip(*(part.tolist() for part in columns))
        ):
            if not int(context.num_new[row]):  # the text was done before
                continue
            on_path = set(path[:count])
            self.num_added += sum(valid[self.num_inner :])
            self.num_hits += sum(node >= self.num_inner for node in on_path)
            rejected = [is_valid and node not in on_path for node, is_valid in enumerate(valid)]
            for run in find_agreeing_runs(tokens, parents, self.answers[row], rejected):
                self.pools[row].add_phrase(run)
