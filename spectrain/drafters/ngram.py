"""Prompt lookup (Saxena, 2023): propose what followed the last few tokens when they were seen before. Needs no training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spectrain.trees.base import Draft

from .abilities import Abilities
from .base import Drafter
from .context import Context

if TYPE_CHECKING:
    from spectrain.models.target import Target


@dataclass
class Index:
    """Where each n-gram of a growing text was last seen with a token behind it."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)  # n-gram -> position of the token behind it
    length: int = 1  # tokens of the text that were read; the n-grams that end with the newest have nothing behind them


class Ngram(Drafter):
    """A chain copied from the latest earlier occurrence of the longest matching n-gram, `longest` to `shortest` tokens."""

    abilities = Abilities(copies_text=True)

    def __init__(self, target: Target, longest: int = 3, shortest: int = 1) -> None:
        super().__init__()
        self.longest, self.shortest = longest, shortest
        self.texts: list[list[int]] = []  # the tokens of every row, root included
        self.indices: list[Index] = []

    def draft(self, context: Context) -> Draft:
        self._read(context)
        depth = context.builder.depth
        return Draft(continuations=[[self._lookup(text, depth, index)] for text, index in zip(self.texts, self.indices)])

    def _read(self, context: Context) -> None:
        """Add the tokens since the last proposal to the texts; all tokens, where a decoding begins."""
        if context.round == 0:
            lengths = (context.cache.lengths + 1).tolist()
            self.texts = [tokens[:length] for tokens, length in zip(context.tokens.tolist(), lengths)]
            self.indices = [Index() for _ in self.texts]
        else:
            for text, tokens, count in zip(self.texts, context.following.tolist(), context.counts.tolist()):
                text += tokens[:count]

    def _lookup(self, tokens: list[int], depth: int, index: Index | None = None) -> list[int]:
        """What followed the n-gram that `tokens` end with; an index that is kept while they grow reads only new ones."""
        index = Index() if index is None else index
        for end in range(index.length, len(tokens)):
            for size in range(self.shortest, min(self.longest, end) + 1):
                index.ends[tuple(tokens[end - size : end])] = end
        index.length = len(tokens)
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            suffix = tuple(tokens[-size:])
            if suffix in index.ends:
                start = index.ends[suffix]
                return tokens[start : start + depth]
        return []
