"""Stored texts, which are searched by their suffixes, sorted.

N is the number of tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

TEXT_END = -1
"""The token between two texts of a store, and after the end of one."""
MAX_MATCH = 16
"""Last tokens of a text that are searched in a store at most; its suffixes are sorted by so many
tokens.
"""


class SuffixIndex:
    """Texts as tokens [N], and the positions [N] of their suffixes, sorted by their first
    `MAX_MATCH` tokens.
    """

    def __init__(self, tokens: np.ndarray, suffixes: np.ndarray) -> None:
        self.tokens, self.suffixes = tokens, suffixes
        # First token -> its range of suffixes.
        self.spans: dict[int, tuple[int, int]] = {}

    def find_continuations(
        self, text: list[int], depth: int, max_matches: int, min_matches: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return how many of a text's last tokens match, [P], and the tokens that follow each
        match, [P, depth].

        TEXT_END fills the positions after the end of a stored text. The longest matches come first;
        shorter ones follow until there are `min_matches`. If one length has too many matches,
        evenly spaced ones are taken. There are at most `max_matches`, each position once.
        """
        length = self.match_length(text)
        unique_ends: set[int] = set()
        ends: list[int] = []
        lengths: list[int] = []
        while length and len(unique_ends) < min_matches:
            low, high = self._find_suffixes(text[-length:])
            room = max_matches - len(unique_ends)
            spread = (
                slice(low, high)
                if high - low <= room
                else np.linspace(low, high - 1, room).astype(np.int64)
            )
            new = sorted(set((self.suffixes[spread] + length).tolist()) - unique_ends)
            unique_ends.update(new)
            ends += new
            lengths += [length] * len(new)
            length -= 1
        positions = np.asarray(ends, dtype=np.int64)[:, None] + np.arange(depth)
        tokens = np.where(
            positions < len(self.tokens),
            self.tokens[np.minimum(positions, len(self.tokens) - 1)],
            TEXT_END,
        )
        tokens = np.where(np.logical_or.accumulate(tokens == TEXT_END, axis=1), TEXT_END, tokens)
        real = tokens[:, 0] != TEXT_END
        return np.asarray(lengths, dtype=np.int64)[real], tokens[real]

    def match_length(self, text: list[int]) -> int:
        """Return how many of a text's last tokens occur together in the store, at most 16; if n
        tokens occur, fewer do too.
        """
        low = 0
        high = min(MAX_MATCH, len(text))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if self.contains_tokens(text[-middle:]) else (low, middle - 1)
            )
        return low

    def contains_tokens(self, tokens: list[int]) -> bool:
        """Tell whether a sequence of any length occurs in the store."""
        low, high = self._find_suffixes(tokens[:MAX_MATCH])
        if len(tokens) <= MAX_MATCH:
            return low < high
        return any(
            self.tokens[start : start + len(tokens)].tolist() == tokens
            for start in self.suffixes[low:high].tolist()
        )

    def _find_suffixes(self, tokens: list[int]) -> tuple[int, int]:
        """Return the range of suffixes that begin with these tokens, of which the first 16
        count.
        """
        first = tokens[0]
        others = tokens[1:]
        if first not in self.spans:
            self.spans[first] = self._narrow_suffixes(0, len(self.suffixes), [first], 0)
        return self._narrow_suffixes(*self.spans[first], others, 1) if others else self.spans[first]

    def _narrow_suffixes(
        self, low: int, high: int, tokens: list[int], skip: int
    ) -> tuple[int, int]:
        """Return the part of suffixes low to high that continues with `tokens`; these suffixes
        share their first `skip` tokens."""
        end = skip + len(tokens)

        def tokens_at(start: int) -> list[int]:
            return self.tokens[int(start) + skip : int(start) + end].tolist()

        low = bisect_left(self.suffixes, tokens, low, high, key=tokens_at)
        if low == high or tokens_at(self.suffixes[low]) != tokens:
            return low, low
        return low, bisect_right(self.suffixes, tokens, low, high, key=tokens_at)
