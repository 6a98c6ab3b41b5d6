"""A bounded, sampled store of recorded conversations: no duplicates, no conversation past its
retention time.

Conversations are held out of training by the hash of their prompt, so that one is never trained on
and proven with. Of every kind the store keeps a random sample (Vitter, 1985, algorithm R), and the
kinds share its room. Past twice its room a sample favours recent conversations, because each new
one still enters with probability 1/2.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from spectrain.errors import UserError
from spectrain.files import iterate_lines, require_regular_file, write_text

from .traffic import RecordedConversation, parse_recorded

HELD_OUT_IN = 4
"""One conversation in so many is held out."""
RECENCY = 2
"""A sample is uniform over so many times its room, and then favours recent conversations."""


class KindSample:
    """A random sample of the conversations of one kind."""

    def __init__(self, generator: random.Random) -> None:
        self.generator = generator
        self.conversations: list[RecordedConversation] = []
        # Distinct conversations that were offered, up to RECENCY times the room.
        self.num_offered = 0

    def add(self, conversation: RecordedConversation, limit: int) -> bool:
        """Add a conversation, or replace a random one by it with the probability that keeps the
        sample uniform.
        """
        self.num_offered = min(self.num_offered + 1, RECENCY * limit)
        if len(self.conversations) < limit:
            self.conversations.append(conversation)
            return True
        # The limit shrinks where another kind begins.
        while len(self.conversations) > limit:
            self.conversations.pop(self.generator.randrange(len(self.conversations)))
        position = self.generator.randrange(self.num_offered)
        if position < limit:
            self.conversations[position] = conversation
        return position < limit


class Reservoir:
    """Recorded conversations by kind, for training or held out."""

    def __init__(self, limit: int, held_out: int, retention_seconds: float, seed: int = 0) -> None:
        self.limits = {False: limit, True: held_out}
        self.retention_seconds = retention_seconds
        self.generator = random.Random(seed)
        self.samples: dict[tuple[bool, str], KindSample] = {}
        self.digests: set[str] = set()
        self.num_duplicates = 0

    def __len__(self) -> int:
        return sum(len(sample.conversations) for sample in self.samples.values())

    def add(self, conversation: RecordedConversation) -> bool:
        """Offer a conversation; return whether it is kept."""
        digest = conversation.digest
        if digest in self.digests:
            self.num_duplicates += 1
            return False
        is_held_out = is_for_proof(digest)
        key = is_held_out, conversation.kind
        sample = self.samples.setdefault(key, KindSample(self.generator))
        num_kinds = sum(1 for held, _ in self.samples if held == is_held_out)
        is_kept = sample.add(conversation, max(1, self.limits[is_held_out] // num_kinds))
        for other in self.samples:
            self._shrink(
                other,
                max(
                    1,
                    self.limits[other[0]] // sum(1 for held, _ in self.samples if held == other[0]),
                ),
            )
        if is_kept:
            self.digests = (
                {entry.digest for entry in self.select()}
                if len(self.digests) > 4 * len(self) + 64
                else self.digests
            )
            self.digests.add(digest)
        return is_kept

    def _shrink(self, key: tuple[bool, str], limit: int) -> None:
        conversations = self.samples[key].conversations
        while len(conversations) > limit:
            conversations.pop(self.generator.randrange(len(conversations)))

    def delete_expired(self, now: float) -> int:
        """Delete conversations past their retention time; return how many."""
        before = len(self)
        for sample in self.samples.values():
            sample.conversations = [
                entry
                for entry in sample.conversations
                if now - entry.time <= self.retention_seconds
            ]
        self.samples = {key: sample for key, sample in self.samples.items() if sample.conversations}
        if len(self) < before:
            self.digests = {entry.digest for entry in self.select()}
        return before - len(self)

    def select(
        self,
        held_out: bool | None = None,
        matches: Callable[[RecordedConversation], bool] = lambda entry: True,
    ) -> list[RecordedConversation]:
        """Return conversations that match, in order of time; `held_out` None takes both halves."""
        chosen = [
            entry
            for (held, _), sample in self.samples.items()
            if held_out is None or held == held_out
            for entry in sample.conversations
            if matches(entry)
        ]
        return sorted(chosen, key=lambda entry: entry.time)

    def count_kinds(self) -> Counter[str]:
        """Return the number of conversations of each kind."""
        return Counter(entry.kind for entry in self.select())

    def save(self, path: Path) -> None:
        """Write all conversations to a JSON Lines file, atomically."""
        write_conversations(path, self.select())

    def load(self, conversations: Iterable[RecordedConversation]) -> None:
        """Add the conversations that an earlier process recorded."""
        for conversation in conversations:
            self.add(conversation)


def is_for_proof(digest: str) -> bool:
    """Return whether the conversation of a hash is held out of training."""
    return int(digest, 16) % HELD_OUT_IN == 0


def write_conversations(path: Path, conversations: Iterable[RecordedConversation]) -> None:
    """Write conversations as JSON Lines, atomically, for this user alone."""
    write_text(path, "".join(json.dumps(entry.to_row()) + "\n" for entry in conversations))
    path.chmod(0o600)


def read_conversations(
    path: Path, report: Callable[[str], None] = lambda problem: None
) -> Iterator[RecordedConversation]:
    """Yield the conversations of a file, if it exists; a line that is damaged is left out, and
    `report` is called with the sentence that names it."""
    if not path.exists():
        return
    require_regular_file(path)
    with path.open("rb") as file:
        for number, line in enumerate(iterate_lines(file, path), 1):
            if not line.strip():
                continue
            try:
                yield parse_recorded(line)
            except UserError as error:
                report(f"{path}: line {number} is left out ({error})")
