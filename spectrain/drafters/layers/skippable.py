"""A drafter that rounds may leave out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from spectrain.drafters.context import Context
from spectrain.models.features import Features
from spectrain.trees.base import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree

if TYPE_CHECKING:
    from spectrain.drafters.base import Drafts


class SkippableDrafter:
    """Asks a drafter or leaves it out of a round; what is committed without it waits until it is asked again."""

    def __init__(self, drafter: Drafts) -> None:
        self.drafter = drafter
        self.deferred_features: tuple[Features, Tensor] | None = None  # what it is to read, in a round that leaves it out

    @property
    def is_active(self) -> bool:
        return self.deferred_features is None

    def draft(self, context: Context) -> Draft:
        """Its draft, after it has read what was committed without it."""
        self.deferred_features = None
        context.catch_up()
        return self.drafter.draft(context)

    def skip(self, context: Context) -> None:
        """This round goes on without it."""
        self.deferred_features = context.fresh, context.counts

    def verify(self, context: Context, tree: TokenTree) -> Features:
        return self.drafter.verify(context, tree) if self.is_active else context.verify(tree)

    def commit(self, context: Context, accepted: AcceptedPath) -> None:
        if self.deferred_features is None:
            self.drafter.commit(context, accepted)
        else:
            context.postpone(self.deferred_features)
