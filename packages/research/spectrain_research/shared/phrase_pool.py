"""The phrases, or n-grams, of a text by their first token, which lookahead decoding and
Ouroboros draft with.
"""

from __future__ import annotations

from collections.abc import Sequence


class PhrasePool:
    """The phrases of one text by their first token, the newest last."""

    def __init__(self, length: int, capacity: int) -> None:
        # Tokens of the longest phrase, and phrases that are retained per first token.
        self.length, self.capacity = length, capacity
        self.phrases: dict[int, list[tuple[int, ...]]] = {}
        # The newest `length` - 1 tokens of the text.
        self.tail: list[int] = []

    def add_phrase(self, phrase: Sequence[int]) -> None:
        """Add the first tokens of a phrase as the newest of its first token; a single token is
        no phrase.
        """
        entry = tuple(phrase[: self.length])
        if len(entry) < 2:
            return
        phrases = self.phrases.setdefault(entry[0], [])
        if entry in phrases:
            phrases.remove(entry)
        phrases.append(entry)
        del phrases[: -self.capacity]

    def add_text(self, tokens: list[int]) -> None:
        """Add every full phrase that ends in these new tokens of the text."""
        text = self.tail + tokens
        for end in range(self.length, len(text) + 1):
            self.add_phrase(text[end - self.length : end])
        self.tail = text[-(self.length - 1) :]

    def find_continuations(self, token: int, count: int) -> list[list[int]]:
        """Return what follows a token in its `count` newest phrases, the newest first."""
        return [list(phrase[1:]) for phrase in reversed(self.phrases.get(token, [])[-count:])]
