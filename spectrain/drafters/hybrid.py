"""A drafter and copies in one tree (RASD, Quan et al., 2025). Shapes: B batch, N nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from spectrain.data.datastore import Datastore
from spectrain.drafters.layers.copies import CopySource
from spectrain.drafters.layers.inner_drafters import DrafterWrapper, build_inner
from spectrain.drafters.layers.skippable import SkippableDrafter
from spectrain.errors import UserError
from spectrain.models.features import Features
from spectrain.trees.base import Draft, TreeBuilder
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain.trees.trie import Trie

from .base import Drafter
from .capabilities import DraftingCost, PromptRunner, SavedFiles, StoreReader, prefill_prompts
from .context import Context

if TYPE_CHECKING:
    from spectrain.models.target import Target


PATIENCE = 256  # tokens that a drafter may fall behind: what it catches up with needs slots


class MergedCost(DraftingCost):
    def extra_nodes(self, builder: TreeBuilder) -> int:
        return int(self.drafter.inner.cost.extra_nodes(builder)) + PATIENCE

    def num_passes(self, depth: float) -> float:
        return float(self.drafter.inner.cost.num_passes(depth))

    def weights(self, target: Target) -> nn.Module:
        weights: nn.Module = self.drafter.inner.cost.weights(target)
        return weights

    def first_verified_layer(self) -> int:
        return int(self.drafter.inner.cost.first_verified_layer())


class Merged(DrafterWrapper, PromptRunner, StoreReader):
    """The tree that a builder grows along the drafter `inner`, and what is copied, merged under the builder's budget by
    calibrated chance; the share of each is learnt while decoding. Trained, it trains the drafter inside.

    A builder that goes by the clock may leave the drafter out of a round whose copies are sure enough; what was committed
    meanwhile waits until it is asked again.
    """

    _cost_type: type[DraftingCost] = MergedCost

    def __init__(self, inner: Drafter, copying: CopySource) -> None:
        super().__init__()
        self.inner, self.copying = inner, copying
        self.resting = SkippableDrafter(inner)
        self.layers = inner.layers
        self.datastore = copying.store
        self.capabilities = replace(inner.capabilities, capture=None, has_no_q=True, nestable=False)

    def prefill(self, context: Context, tokens: Tensor, lengths: Tensor) -> Features:
        return prefill_prompts(self.inner, context, tokens, lengths)

    def draft(self, context: Context) -> Draft:
        self.copying.propose_copies(context)
        copies = self._tries()
        num_unread = sum(features.tokens.shape[1] for features, _ in context.deferred)
        soon = 2 * (context.builder.depth + 1)  # what the last round with it committed, and what this one may
        if num_unread + soon <= PATIENCE and not context.builder.needs_drafter(context, copies):
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

    saved = SavedFiles(inner=("inner",))

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
        if drafter.capabilities.is_copier or drafter.capabilities.has_no_q:
            raise UserError(
                f"drafter.inner={description['choice']}: it copies too; name one that drafts, or use drafter=retrieval"
            )
        datastore = None if store is None else Datastore(store, target.tokenizer)
        super().__init__(drafter, CopySource(datastore, longest, matches, enough))
        self.saved = replace(self.saved, settings={"inner": description})
