"""Drafts looked up in the text itself and in a store of texts (REST, He et al., 2024). Needs no training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spectrain.data.datastore import Datastore
from spectrain.drafters.layers.copies import CopySource
from spectrain.trees.base import Draft

from .abilities import Abilities
from .base import Drafter
from .context import Context

if TYPE_CHECKING:
    from spectrain.models.target import Target


class Retrieval(Drafter):
    """What followed elsewhere where the text read as it does now, merged into one tree by calibrated chance.

    In the text itself up to `longest` of its last tokens are looked for, in the `store` up to 16; where those that match are
    fewer than `enough`, fewer tokens are, up to `matches` places of each source; REST stops at the longest match. How far a
    saying is trusted is learnt while decoding, by its source, how many tokens match, and which share of the matches says so.
    """

    abilities = Abilities(copies_text=True, undrawn=True, datastore=lambda drafter: drafter.copying.store)

    def __init__(
        self,
        target: Target,
        store: str | None = None,  # a folder that spectrain data index wrote; null: the text alone
        longest: int = 6,  # tokens of the text's end that are looked for in the text itself
        matches: int = 200,  # places of each source that are read at most
        enough: int = 64,  # with fewer places in the store, shorter ends of the text are looked for
    ) -> None:
        super().__init__()
        known = None if store is None else Datastore(store, target.tokenizer)
        self.copying = CopySource(known, longest, matches, enough)

    def draft(self, context: Context) -> Draft:
        proposals = self.copying.propose_copies(context)
        return Draft(continuations=[proposal.weigh_trie(self.copying.estimator) for proposal in proposals])
