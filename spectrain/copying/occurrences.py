"""Earlier occurrences of a text's last tokens, and the tokens that followed them there.

Shapes: P occurrences, D tokens after each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .trie import Trie


@dataclass(frozen=True)
class Occurrence:
    """An earlier occurrence of the text's last tokens."""

    length: int  # number of matching tokens
    tokens: list[int]  # the tokens that followed


class Copies(NamedTuple):
    """The continuations of many occurrences."""

    lengths: np.ndarray  # [P] numbers of matching tokens
    tokens: np.ndarray  # [P, D], padded with TEXT_END

    @classmethod
    def from_occurrences(cls, occurrences: list[Occurrence], depth: int) -> Copies:
        """Collect continuations of `depth` tokens each."""
        tokens = np.asarray(
            [occurrence.tokens for occurrence in occurrences], dtype=np.int64
        ).reshape(-1, depth)
        return cls(
            np.asarray([occurrence.length for occurrence in occurrences], dtype=np.int64), tokens
        )


class IndexedText:
    """A growing text, and an index of its n-grams of up to `max_length` tokens that another
    token follows.
    """

    def __init__(self, tokens: list[int], max_length: int) -> None:
        self.tokens, self.max_length = tokens, max_length
        # n-gram -> positions of the next token
        self.ngram_ends: dict[tuple[int, ...], list[int]] = defaultdict(list)
        # No token follows the n-grams that end with the last token, so these are not indexed yet.
        self.num_indexed = 1

    def find_occurrences(
        self, depth: int, max_matches: int, min_length: int = 1, path: Sequence[int] = ()
    ) -> list[Occurrence]:
        """Find earlier occurrences of the last tokens of the text and a `path` after it, each
        position once.

        The longest match comes first, and of equally long ones the latest. A copy that reaches the
        end of the text continues with its own tokens, so that a text which repeats itself is copied
        on.
        """
        self._index_tokens()
        tokens = [*self.tokens[-self.max_length :], *path]
        match_lengths = dict[int, int]()
        for length in range(
            min(self.max_length, len(self.tokens) + len(path) - 1), min_length - 1, -1
        ):
            for end in reversed(self.ngram_ends.get(tuple(tokens[-length:]), ())):
                if len(match_lengths) >= max_matches:
                    break
                match_lengths.setdefault(end, length)
        return [
            Occurrence(length, self._tokens_from(end, depth))
            for end, length in match_lengths.items()
        ]

    def continue_path(self, path: list[int], depth: int) -> list[int]:
        """Return the tokens after the latest longest match of the text and `path`; none if there
        is no match.
        """
        self._index_tokens()
        tail = (*self.tokens[-self.max_length :], *path)[-self.max_length :]
        for start in range(len(tail)):
            if ends := self.ngram_ends.get(tail[start:]):
                return self._tokens_from(ends[-1], depth)
        return []

    def _tokens_from(self, end: int, depth: int) -> list[int]:
        """Return `depth` tokens from a position on, repeated if the text is too short."""
        following = self.tokens[end : end + depth]
        return following if len(following) == depth else (following * depth)[:depth]

    def _index_tokens(self) -> None:
        for end in range(self.num_indexed, len(self.tokens)):
            for size in range(1, min(self.max_length, end) + 1):
                self.ngram_ends[tuple(self.tokens[end - size : end])].append(end)
        self.num_indexed = len(self.tokens)


def build_trie(occurrences: list[Occurrence]) -> Trie:
    """Build a trie of continuations, weighted by the lengths and the number of their matches,
    slightly more for the first ones.

    The growth with the length hardly matters (2, 4 and 8: 1.77 tokens per forward each, tiny,
    trees of 16 nodes).
    """
    trie = Trie()
    for rank, occurrence in enumerate(occurrences):
        trie.add_continuation(occurrence.tokens, 2.0**occurrence.length * 0.97**rank)
    return trie
