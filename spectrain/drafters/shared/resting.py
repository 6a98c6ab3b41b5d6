"""A drafter that rounds may leave out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from spectrain.models.features import Features
from spectrain.trees.base import Draft
from spectrain.trees.token_tree import Accepted, TokenTree

from ..context import Context

if TYPE_CHECKING:
    from ..base import Drafts


class Resting:
    """Asks a drafter or leaves it out of a round; what is committed without it waits until it is asked again."""

    def __init__(self, drafter: Drafts) -> None:
        self.drafter = drafter
        self.before: tuple[Features, Tensor] | None = None  # what it is to read, in a round that leaves it out

    @property
    def is_asked(self) -> bool:
        return self.before is None

    def ask(self, context: Context) -> Draft:
        """Its draft, after it has read what was committed without it."""
        self.before = None
        context.catch_up()
        return self.drafter.draft(context)

    def leave_out(self, context: Context) -> None:
        """This round goes on without it."""
        self.before = context.fresh, context.counts

    def verify(self, context: Context, tree: TokenTree) -> Features:
        return self.drafter.verify(context, tree) if self.is_asked else context.verify(tree)

    def commit(self, context: Context, accepted: Accepted) -> None:
        if self.before is None:
            self.drafter.commit(context, accepted)
        else:
            context.postpone(self.before)
