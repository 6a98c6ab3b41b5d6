"""Texts that are copied from: where what a text ends with stood before, and what followed it there."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from spectrain.trees.trie import Trie

from ..context import Context


@dataclass(frozen=True)
class Occurrence:
    """An earlier place that reads like the text's end."""

    length: int  # tokens before it that are those at the text's end
    tokens: list[int]  # what followed there


class IndexedText:
    """A text that grows, and where each of its n-grams of up to `longest` tokens stood with a token behind it."""

    def __init__(self, tokens: list[int], longest: int) -> None:
        self.tokens, self.longest = tokens, longest
        self.ends: dict[tuple[int, ...], list[int]] = defaultdict(list)  # n-gram -> positions of the token behind it
        self.num_read = 1  # the n-grams that end with the newest token have nothing behind them

    def occurrences(self, depth: int, most: int, shortest: int = 1) -> list[Occurrence]:
        """Where the text's last tokens stood before: the longest match first, of equal ones the newest, each place once.

        A copy that reaches the text's end goes on with what it has copied, so that a text which repeats itself does so.
        """
        self._read()
        tokens, places = self.tokens, dict[int, int]()
        for length in range(min(self.longest, len(tokens) - 1), shortest - 1, -1):
            for end in reversed(self.ends.get(tuple(tokens[-length:]), ())):
                if len(places) >= most:
                    break
                places.setdefault(end, length)
        return [
            Occurrence(length, [tokens[end + step % (len(tokens) - end)] for step in range(depth)])
            for end, length in places.items()
        ]

    def _read(self) -> None:
        for end in range(self.num_read, len(self.tokens)):
            for size in range(1, min(self.longest, end) + 1):
                self.ends[tuple(self.tokens[end - size : end])].append(end)
        self.num_read = len(self.tokens)


class GrowingTexts:
    """The texts of a batch, roots included, which are followed from round to round."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.rows: list[IndexedText] = []

    def read(self, context: Context) -> list[list[int]]:
        """Add the tokens since the last draft, and return these; all tokens, where a decoding begins."""
        if context.round == 0:
            lengths = (context.lengths + 1).tolist()
            news = [tokens[:length] for tokens, length in zip(context.tokens.tolist(), lengths)]
            self.rows = [IndexedText([], self.longest) for _ in news]
        else:
            news = [tokens[:count] for tokens, count in zip(context.following.tolist(), context.counts.tolist())]
        for row, tokens in zip(self.rows, news):
            row.tokens += tokens
        return news


def weighted(occurrences: list[Occurrence], growth: float = 2.0, fading: float = 0.97) -> Trie:
    """Continuations by how much of the text they match and how often, those that come first a little ahead.

    Which growth hardly matters (2, 4 and 8: 1.77 tokens a forward each, tiny, trees of 16 nodes).
    """
    trie = Trie()
    for rank, occurrence in enumerate(occurrences):
        trie.add(occurrence.tokens, growth**occurrence.length * fading**rank)
    return trie
