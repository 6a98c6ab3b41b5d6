"""A drafter and copies in one tree (RASD, Quan et al., 2025). Shapes: B batch, N nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from spectrain.copying.trie import Trie
from spectrain.drafters.layers.copies import CopySource
from spectrain.drafters.layers.inner_drafters import (
    DrafterWrapper,
    InnerCost,
    build_inner,
    wrapper_capabilities,
)
from spectrain.drafters.layers.skippable import SkippableDrafter
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.models.target import Target
from spectrain.trees.base import TreeBuilder
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree

from .base import Drafter, prefill_prompts
from .capabilities import SavedFiles
from .context import Context

# Number of tokens that a skipped drafter may have to read later; each needs a slot in its cache.
PATIENCE = 256


class CostWithCopies(InnerCost):
    """The cost of the inner drafter, and the slots of the tokens that it reads later."""

    def extra_nodes(self, builder: TreeBuilder) -> int:
        return super().extra_nodes(builder) + PATIENCE


class DrafterWithCopies(DrafterWrapper):
    """Merges the tree of the drafter `inner` with copies, under the builder's budget.

    Nodes are chosen by calibrated acceptance probability, which is learned while decoding for each
    source. Training trains the inner drafter. A builder that uses latencies may skip the drafter in
    a round whose copies are probable enough; the drafter reads the tokens of skipped rounds when it
    drafts next.
    """

    def __init__(self, inner: Drafter, copying: CopySource) -> None:
        super().__init__()
        self.inner, self.copying = inner, copying
        self.skippable = SkippableDrafter(inner)
        self.layers = inner.layers
        self.capabilities = replace(
            wrapper_capabilities(inner),
            has_no_q=True,
            datastore=copying.store,
            prefill=type(self).prefill,
            cost=CostWithCopies,
        )

    def prefill(self, context: Context, tokens: Tensor, lengths: Tensor) -> Features:
        """Run the prompts as the inner drafter does."""
        return prefill_prompts(self.inner, context, tokens, lengths)

    def draft(self, context: Context) -> Draft:
        self.copying.propose_copies(context)
        copies = self._weigh_tries()
        num_unread = sum(features.tokens.shape[1] for features, _ in context.deferred)
        # committed by the last round with the drafter, and by this one
        num_upcoming = 2 * (context.builder.depth + 1)
        if num_unread + num_upcoming <= PATIENCE and not context.builder.round_policy.needs_drafter(
            context, copies
        ):
            self.skippable.skip(context)
            return Draft(continuations=copies)
        draft = self.skippable.draft(context)
        # The drafter cannot draft in every round.
        if draft.rollout is None:
            return replace(draft, continuations=copies)
        return replace(draft, merge_copies=self._merge_tries)

    def verify(self, context: Context, tree: TokenTree) -> Features:
        return self.skippable.verify(context, tree)

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        self.skippable.commit(context, accepted)

    def _merge_tries(self, tree: TokenTree) -> list[Trie]:
        """Return the tries of every text, with the drafter's nodes [B, N] added."""
        assert tree.scores is not None
        nodes = (tree.tokens, tree.parents, tree.scores, tree.valid)
        for proposal, *row in zip(self.copying.proposals, *(part.tolist() for part in nodes)):
            proposal.add_draft(*row)
        return self._weigh_tries()

    def _weigh_tries(self) -> list[Trie]:
        return [proposal.weigh_trie(self.copying.estimator) for proposal in self.copying.proposals]


def build_partner(
    inner: str | dict[str, Any], target: Target, advice: str
) -> tuple[Drafter, dict[str, Any]]:
    """Build a drafter to which copies are added, with its description; raise a UserError, which
    ends with the advice, for one that copies itself."""
    drafter, description = build_inner(inner, "inner", target)
    if drafter.capabilities.is_copier or drafter.capabilities.has_no_q:
        raise UserError(
            f"drafter.inner={description['choice']}: it copies too; name a drafter that does "
            f"not{advice}"
        )
    return drafter, description


class Hybrid(DrafterWithCopies):
    """Combines a drafter with the copies of drafter=retrieval, with its settings, in one tree."""

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
        # Largest number of final tokens of the text that are matched in the text itself.
        longest: int = 6,
        # Largest number of matching positions that are read per source.
        matches: int = 200,
        # Number of matches in the store below which shorter endings of the text are matched too.
        enough: int = 64,
    ) -> None:
        drafter, description = build_partner(inner, target, ", or use drafter=retrieval")
        super().__init__(
            drafter, CopySource.open(store, target.tokenizer, longest, matches, enough)
        )
        self.saved = replace(self.saved, settings={"inner": description})
