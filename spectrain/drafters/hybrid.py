"""A drafter and copies in one tree (RASD, Quan et al., 2025). Shapes: B batch, N nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from spectrain.data.datastore import Datastore
from spectrain.drafters.layers.copies import CopySource
from spectrain.drafters.layers.inner_drafters import DrafterWrapper, build_inner
from spectrain.drafters.layers.skippable import SkippableDrafter
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.trees.base import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain.trees.trie import Trie

from .abilities import DraftingCost, SavedFiles
from .base import Drafter
from .context import Context

if TYPE_CHECKING:
    from spectrain.models.target import Target


PATIENCE = 256  # tokens that a drafter may fall behind: what it catches up with needs slots


class Merged(DrafterWrapper):
    """The tree that a builder grows along the drafter `inner`, and what is copied, merged under the builder's budget by
    calibrated chance; the share of each is learnt while decoding. Trained, it trains the drafter inside.

    A builder that goes by the clock may leave the drafter out of a round whose copies are sure enough; what was committed
    meanwhile waits until it is asked again.
    """

    cost = DraftingCost(
        extra_nodes=lambda drafter, builder: drafter.inner.cost.extra_nodes(drafter.inner, builder) + PATIENCE,
        passes=lambda drafter, depth: drafter.inner.cost.passes(drafter.inner, depth),
        weights=lambda drafter, target: drafter.inner.cost.weights(drafter.inner, target),
        verified_from=lambda drafter: drafter.inner.cost.verified_from(drafter.inner),
    )

    def __init__(self, inner: Drafter, copying: CopySource) -> None:
        super().__init__()
        self.inner, self.copying = inner, copying
        self.resting = SkippableDrafter(inner)
        self.layers = inner.layers
        self.abilities = replace(
            inner.abilities,
            capture=None,
            exits=None,
            tuning=None,
            undrawn=True,
            plain=False,
            prefill=inner.abilities.prefill and Merged.prefill,
            datastore=lambda drafter: drafter.copying.store,
        )

    def prefill(self, context: Context, tokens: Tensor, lengths: Tensor) -> Features:
        assert self.inner.abilities.prefill is not None
        return self.inner.abilities.prefill(self.inner, context, tokens, lengths)

    def draft(self, context: Context) -> Draft:
        self.copying.propose_copies(context)
        copies = self._tries()
        behind = sum(features.tokens.shape[1] for features, _ in context.waiting)
        soon = 2 * (context.builder.depth + 1)  # what the last round with it committed, and what this one may
        if behind + soon <= PATIENCE and not context.builder.needs_drafter(context, copies):
            self.resting.skip(context)
            return Draft(continuations=copies)
        draft = self.resting.draft(context)
        if draft.rollout is None:  # a round in which it cannot draft
            return replace(draft, continuations=copies)
        return replace(draft, merge_copies=self._joined)

    def verify(self, context: Context, tree: TokenTree) -> Features:
        return self.resting.verify(context, tree)

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        self.resting.commit(context, accepted)

    def _joined(self, tree: TokenTree) -> list[Trie]:
        """Return the tries of every text, with the drafter's nodes [B, N] added."""
        assert tree.scores is not None
        nodes = (tree.tokens, tree.parents, tree.scores, tree.valid)
        for proposal, *row in zip(self.copying.proposals, *(part.tolist() for part in nodes)):
            proposal.add_draft(*row)
        return self._tries()

    def _tries(self) -> list[Trie]:
        return [proposal.weigh_trie(self.copying.estimator) for proposal in self.copying.proposals]


class Hybrid(Merged):
    """Combines a drafter with the copies of drafter=retrieval, with its settings, in one tree."""

    saved = SavedFiles(inner=("inner",), settings=lambda drafter: {"inner": drafter.description})

    def __init__(
        self,
        target: Target,
        # Drafter to combine with copies: a run folder, a drafter directory, or a choice, alone or with settings.
        inner: str | dict[str, Any] = "eagle3",
        # Folder that spectrain data index wrote, to copy from; null copies from the current text only.
        store: str | None = None,
        # Largest number of final tokens of the text that are matched in the text itself.
        longest: int = 6,
        # Largest number of matching positions that are read per source.
        matches: int = 200,
        # Number of matches in the store below which shorter endings of the text are matched too.
        enough: int = 64,
    ) -> None:
        drafter, description = build_inner(inner, "inner", target)
        if drafter.abilities.copies_text or drafter.abilities.undrawn:
            raise UserError(
                f"drafter.inner={description['choice']}: it copies too; name one that drafts, or use drafter=retrieval"
            )
        known = None if store is None else Datastore(store, target.tokenizer)
        super().__init__(drafter, CopySource(known, longest, matches, enough))
        self.description = description
