"""Long documents whose later parts repeat earlier ones at any distance, from the embedded
conversations.

A document is a sequence of segments: new passages, facts ("The number of orchard 12 is 48213."),
and repetitions of passages and facts that stand anywhere before them in the document. Who reads
only the newest tokens cannot predict most repetitions.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spectrain.data.readers import EmbeddedReader
from spectrain.eval.context import THINGS

HELD_OUT_EVERY = 20
"""Every so many conversations one is left to tests."""
# tokens
MIN_PASSAGE = 96
MAX_PASSAGE = 192
REPEATED_SHARE = 0.5
FACT_SHARE = 0.2


@dataclass(frozen=True)
class Segment:
    """A part of a document."""

    start: int  # of its first token
    tokens: list[int]
    # First token of the segment that it repeats; None for a new one.
    source: int | None
    is_fact: bool

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Document:
    """Token ids with the segments that they are made of, the last of which may be cut."""

    tokens: list[int]
    segments: list[Segment]


def read_passages(tokenizer: Any, held_out: bool) -> list[list[int]]:
    """Return the passages of the conversations that are held out, or of all others."""
    passages = []
    for number, conversation in enumerate(EmbeddedReader().read_conversations()):
        if (number % HELD_OUT_EVERY == 0) != held_out:
            continue
        text = "\n\n".join(message["content"] for message in conversation.messages) + "\n\n"
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        parts = [
            tokens[start : start + MAX_PASSAGE] for start in range(0, len(tokens), MAX_PASSAGE)
        ]
        passages += [part for part in parts if len(part) >= MIN_PASSAGE]
    return passages


class RepeatingWriter(ABC):
    """Writes documents of any length, whose segments are new or repeat earlier ones, the same
    documents from the same seed.
    """

    fact_share: float

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    @abstractmethod
    def draw_repetition(self, start: int) -> bool:
        """Draw whether the segment that begins with token number `start` repeats an earlier one."""

    @abstractmethod
    def write_new(self, is_fact: bool) -> list[int]:
        """Return the tokens of a new fact or passage."""

    def write_document(self, length: int) -> Document:
        """Write a document of exactly `length` tokens."""
        segments: list[Segment] = []
        while not segments or segments[-1].end < length:
            segments.append(self._write_segment(segments))
        tokens = [token for segment in segments for token in segment.tokens][:length]
        return Document(tokens, segments)

    def _write_segment(self, segments: list[Segment]) -> Segment:
        """Write the segment after others: a new one, or a repetition of any of them with equal
        chances.
        """
        start = segments[-1].end if segments else 0
        is_fact = self.random.random() < self.fact_share
        new = [
            segment for segment in segments if segment.source is None and segment.is_fact == is_fact
        ]
        if new and self.draw_repetition(start):
            repeated = self.random.choice(new)
            return Segment(start, repeated.tokens, repeated.start, is_fact)
        return Segment(start, self.write_new(is_fact), None, is_fact)


class DocumentWriter(RepeatingWriter):
    """Writes documents of passages, none of which is new twice in a document, and of facts."""

    fact_share = FACT_SHARE

    def __init__(self, tokenizer: Any, passages: Sequence[list[int]], seed: int) -> None:
        super().__init__(seed)
        self.tokenizer, self.passages = tokenizer, passages
        self.unused: list[list[int]] = []

    def write_document(self, length: int) -> Document:
        if len(self.unused) * MIN_PASSAGE < length:
            self.unused = list(self.passages)
            self.random.shuffle(self.unused)
        return super().write_document(length)

    def draw_repetition(self, start: int) -> bool:
        return self.random.random() < REPEATED_SHARE

    def write_new(self, is_fact: bool) -> list[int]:
        return self._write_fact() if is_fact else self.unused.pop()

    def _write_fact(self) -> list[int]:
        thing = self.random.choice(THINGS)
        number = self.random.randrange(100)
        value = self.random.randrange(10_000, 100_000)
        text = f"The number of {thing} {number} is {value}.\n\n"
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens
