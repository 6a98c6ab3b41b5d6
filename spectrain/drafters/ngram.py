"""Prompt lookup (Saxena, 2023): copy the continuations of earlier occurrences of the last few
tokens, without training.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from spectrain.config.values import Count
from spectrain.copying.occurrences import build_trie
from spectrain.copying.trie import Trie
from spectrain.drafters.layers.copies import GrowingTexts
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.trees.rollout import Draft

from .base import Drafter
from .capabilities import Capabilities
from .context import Context


class Ngram(Drafter):
    """Copies the continuations of earlier occurrences of the text's last `shortest` to `longest`
    tokens.

    Up to `matches` occurrences form one weighted trie: a chain takes its most likely path, other
    trees its heaviest nodes.
    """

    capabilities = Capabilities(is_copier=True)

    def __init__(
        self,
        target: Target,
        # Largest number of final tokens of the text that are matched.
        longest: Count = 3,
        # Smallest number of final tokens of the text that are matched.
        shortest: int = 1,
        # Largest number of earlier occurrences that are read.
        matches: Count = 64,
    ) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, rewind=type(self).rewind)
        if not 1 <= shortest <= longest:
            raise UserError(
                f"drafter.shortest={shortest}: use 1 to {longest}, which is drafter.longest"
            )
        self.shortest, self.matches = shortest, matches
        self.texts = GrowingTexts(longest)

    def draft(self, context: Context) -> Draft:
        self.texts.append_committed(context)
        depth = context.builder.depth

        def copies_after(row: int, path: list[int]) -> Trie:
            return build_trie(
                self.texts.rows[row].find_occurrences(depth, self.matches, self.shortest, path)
            )

        return Draft(
            continuations=[copies_after(row, []) for row in range(len(self.texts.rows))],
            copies_after=copies_after,
        )

    def rewind(self, lengths: Tensor) -> None:
        """Forget the texts; the next round reads them anew."""
        self.texts.reset_texts()
