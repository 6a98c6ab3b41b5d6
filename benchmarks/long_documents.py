"""Long documents whose later parts repeat earlier ones at any distance, from the embedded conversations.

A document is a sequence of segments: new passages, facts ("The number of orchard 12 is 48213."), and repetitions of passages
and facts that stand anywhere before them in the document. Who reads only the newest tokens cannot predict most repetitions.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spectrain.data.readers import EmbeddedReader

HELD_OUT_EVERY = 20
"""Every so many conversations one is left to tests."""
MIN_PASSAGE, MAX_PASSAGE = 96, 192  # tokens
REPEATED_SHARE, FACT_SHARE = 0.5, 0.2
THINGS = ("lighthouse", "orchard", "ferry", "archive", "workshop", "harbor", "observatory", "bakery", "quarry", "library")


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
        parts = [tokens[start : start + MAX_PASSAGE] for start in range(0, len(tokens), MAX_PASSAGE)]
        passages += [part for part in parts if len(part) >= MIN_PASSAGE]
    return passages


class DocumentWriter:
    """Writes documents of any length from passages, the same ones from the same seed."""

    def __init__(self, tokenizer: Any, passages: Sequence[list[int]], seed: int) -> None:
        self.tokenizer, self.passages, self.random = tokenizer, passages, random.Random(seed)
        self.unused: list[list[int]] = []

    def write_document(self, length: int) -> Document:
        """Write a document of exactly `length` tokens, in which no passage is new twice."""
        segments: list[Segment] = []
        if len(self.unused) * MIN_PASSAGE < length:
            self.unused = list(self.passages)
            self.random.shuffle(self.unused)
        while not segments or segments[-1].end < length:
            segments.append(self._write_segment(segments))
        tokens = [token for segment in segments for token in segment.tokens][:length]
        return Document(tokens, segments)

    def _write_segment(self, segments: list[Segment]) -> Segment:
        """Write the segment after others: a new one, or a repetition of any of them with equal chances."""
        start = segments[-1].end if segments else 0
        is_fact = self.random.random() < FACT_SHARE
        new = [segment for segment in segments if segment.source is None and segment.is_fact == is_fact]
        if new and self.random.random() < REPEATED_SHARE:
            repeated = self.random.choice(new)
            return Segment(start, repeated.tokens, repeated.start, is_fact)
        return Segment(start, self._write_fact() if is_fact else self.unused.pop(), None, is_fact)

    def _write_fact(self) -> list[int]:
        thing, number, value = self.random.choice(THINGS), self.random.randrange(100), self.random.randrange(10_000, 100_000)
        text = f"The number of {thing} {number} is {value}.\n\n"
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens
