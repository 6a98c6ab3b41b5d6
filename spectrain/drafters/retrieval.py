"""Drafts looked up in the text itself and in a store of texts (REST, He et al., 2024). Needs no
training.
"""

from __future__ import annotations

from dataclasses import replace

from spectrain.drafters.layers.copies import CopySource
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft

from .base import Drafter
from .capabilities import Capabilities
from .context import Context


class Retrieval(Drafter):
    """Merges continuations of earlier matches of the text's end into one tree, weighted by
    calibrated probability.

    Up to `longest` final tokens are matched in the text itself and up to 16 in the `store`. With
    fewer than `enough` matches, shorter endings are matched too, up to `matches` positions per
    source; REST stops at the longest match. The acceptance probability of a copy is learned while
    decoding, from its source, the matched length and the share of agreeing matches.
    """

    capabilities = Capabilities(is_copier=True, has_no_q=True)

    def __init__(
        self,
        target: Target,
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
        super().__init__()
        self.copying = CopySource.open(store, target.tokenizer, longest, matches, enough)
        self.capabilities = replace(self.capabilities, datastore=self.copying.store)

    def draft(self, context: Context) -> Draft:
        proposals = self.copying.propose_copies(context)
        return Draft(
            continuations=[proposal.weigh_trie(self.copying.estimator) for proposal in proposals]
        )
