"""Synthetic documents that a model can read only with their own beginning in view.

Words are tokens without meaning. What follows a word in new text is drawn from a chain that all
documents share. Each document has passages and facts of its own, and returns to any of them at any
distance, so that the loss of a model that uses its context falls down the whole document. The share
of new segments falls from 1 at the start to 0.15 far from it.
"""

import random
from dataclasses import dataclass

from .long_documents import RepeatingWriter

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
KEY_WORDS = 2
VALUE_WORDS = 4
SUCCESSORS = 12
"""Words that may follow a word in new text, with chances in proportion to 1, 1/2, 1/3 and so on."""
FACT_SHARE = 0.4
LEAST_NEW = 0.15
NEW_TOKENS = 256
"""At a position p a segment is new with the chance LEAST_NEW + (1 - LEAST_NEW) / (1 + p /
NEW_TOKENS).
"""


@dataclass(frozen=True)
class WordChain:
    """The words and what follows each of them in new text, the same ones from the same seed."""

    vocab_size: int
    successors: list[list[int]]
    chances: list[float]  # cumulative

    @classmethod
    def build_chain(cls, vocab_size: int, seed: int = 0) -> "WordChain":
        """Draw the successors of every word."""
        order = random.Random(seed)
        words = range(len(SPECIAL), vocab_size)
        sums = [sum(1 / rank for rank in range(1, count + 1)) for count in range(1, SUCCESSORS + 1)]
        successors = [order.sample(words, SUCCESSORS) for _ in words]
        return cls(vocab_size, [[] for _ in SPECIAL] + successors, sums)

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
        """Return the tokens of a fact with a key and a value of words that nothing else
        foretells.
        """
        the, number, of, equals, stop = (
            SPECIAL.index(word) for word in ("The", "number", "of", "is", ".")
        )
        key, value = (
            [self.draw_word(order) for _ in range(count)] for count in (KEY_WORDS, VALUE_WORDS)
        )
        return [the, number, of, *key, equals, *value, stop]


class PrivateWriter(RepeatingWriter):
    """Writes documents of passages and facts of their own."""

    fact_share = FACT_SHARE

    def __init__(
        self, chain: WordChain, seed: int, passage_tokens: tuple[int, int] = (64, 96)
    ) -> None:
        super().__init__(seed)
        self.chain, self.passage_tokens = chain, passage_tokens

    def draw_repetition(self, start: int) -> bool:
        return self.random.random() > LEAST_NEW + (1 - LEAST_NEW) / (1 + start / NEW_TOKENS)

    def write_new(self, is_fact: bool) -> list[int]:
        if is_fact:
            return self.chain.write_fact(self.random)
        return self.chain.write_passage(self.random, self.random.randint(*self.passage_tokens))
