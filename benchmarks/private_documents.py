"""Synthetic documents that a model can read only with their own beginning in view.

Words are tokens without meaning. What follows a word in new text is drawn from a chain that all documents share. Each document
has passages and facts of its own, and returns to any of them at any distance, so that the loss of a model that uses its context
falls down the whole document. The share of new segments falls from 1 at the start to 0.15 far from it.
"""

import random
from dataclasses import dataclass

from .long_documents import Document, Segment

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "user",
    "assistant",
    "system",
    "<unk>",
    "The",
    "number",
    "of",
    "is",
    ".",
)
"""Tokens before the words; "The number of KEY is VALUE ." is a fact."""
KEY_WORDS, VALUE_WORDS = 2, 4
SUCCESSORS = 12
"""Words that may follow a word in new text, with chances in proportion to 1, 1/2, 1/3 and so on."""
FACT_SHARE = 0.4
LEAST_NEW, NEW_TOKENS = 0.15, 256
"""At a position p a segment is new with the chance LEAST_NEW + (1 - LEAST_NEW) / (1 + p / NEW_TOKENS)."""


@dataclass(frozen=True)
class WordChain:
    """The words and what follows each of them in new text, the same ones from the same seed."""

    vocab_size: int
    successors: list[list[int]]
    chances: list[float]  # cumulative

    @classmethod
    def build_chain(cls, vocab_size: int, seed: int = 0) -> "WordChain":
        """Draw the successors of every word."""
        order, words = random.Random(seed), range(len(SPECIAL), vocab_size)
        sums = [sum(1 / rank for rank in range(1, count + 1)) for count in range(1, SUCCESSORS + 1)]
        drawn = [order.sample(words, SUCCESSORS) for _ in words]
        return cls(vocab_size, [[] for _ in SPECIAL] + drawn, sums)

    def write_passage(self, order: random.Random, length: int) -> list[int]:
        """Return the tokens of new text, which begins with any word."""
        tokens = [self.draw_word(order)]
        while len(tokens) < length:
            tokens += order.choices(self.successors[tokens[-1]], cum_weights=self.chances)
        return tokens

    def draw_word(self, order: random.Random) -> int:
        """Return any word."""
        return order.randrange(len(SPECIAL), self.vocab_size)

    def write_fact(self, order: random.Random) -> list[int]:
        """Return the tokens of a fact with a key and a value of words that nothing else foretells."""
        the, number, of, equals, stop = (SPECIAL.index(word) for word in ("The", "number", "of", "is", "."))
        key, value = ([self.draw_word(order) for _ in range(count)] for count in (KEY_WORDS, VALUE_WORDS))
        return [the, number, of, *key, equals, *value, stop]


class PrivateWriter:
    """Writes documents of any length, the same ones from the same seed."""

    def __init__(self, chain: WordChain, seed: int, passage_tokens: tuple[int, int] = (64, 96)) -> None:
        self.chain, self.random, self.passage_tokens = chain, random.Random(seed), passage_tokens

    def write_document(self, length: int) -> Document:
        """Write a document of exactly `length` tokens."""
        segments: list[Segment] = []
        while not segments or segments[-1].end < length:
            segments.append(self._write_segment(segments))
        tokens = [token for segment in segments for token in segment.tokens][:length]
        return Document(tokens, segments)

    def _write_segment(self, segments: list[Segment]) -> Segment:
        """Write the segment after others: a new one, or a repetition of any of them with equal chances."""
        start = segments[-1].end if segments else 0
        is_fact = self.random.random() < FACT_SHARE
        new = [segment for segment in segments if segment.source is None and segment.is_fact == is_fact]
        if new and self.random.random() > LEAST_NEW + (1 - LEAST_NEW) / (1 + start / NEW_TOKENS):
            repeated = self.random.choice(new)
            return Segment(start, repeated.tokens, repeated.start, is_fact)
        if is_fact:
            return Segment(start, self.chain.write_fact(self.random), None, is_fact)
        return Segment(start, self.chain.write_passage(self.random, self.random.randint(*self.passage_tokens)), None, is_fact)
