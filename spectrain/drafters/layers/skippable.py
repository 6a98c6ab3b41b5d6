"""A drafter that rounds may skip."""

from __future__ import annotations

from torch import Tensor

from spectrain.drafters.base import Drafts
from spectrain.drafters.context import Context
from spectrain.models.features import Features
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree


class SkippableDrafter:
    """Runs or skips a drafter in each round. Features that are committed without it wait for its
    next draft.
    """

    def __init__(self, drafter: Drafts) -> None:
        self.drafter = drafter
        # Features that the drafter has not read, in a round that skips it.
        self.deferred_features: tuple[Features, Tensor] | None = None

    @property
    def is_active(self) -> bool:
        """Whether the drafter drafts in this round."""
        return self.deferred_features is None

    def draft(self, context: Context) -> Draft:
        """Let the drafter read the features of skipped rounds, and draft."""
        self.deferred_features = None
        context.catch_up()
        return self.drafter.draft(context)

    def skip(self, context: Context) -> None:
        """Skip the drafter in this round."""
        self.deferred_features = context.new_features, context.num_new

    def verify(self, context: Context, tree: TokenTree) -> Features:
        return self.drafter.verify(context, tree) if self.is_active else context.verify(tree)

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        if self.deferred_features is None:
            self.drafter.commit(context, accepted)
        else:
            context.defer(self.deferred_features)
