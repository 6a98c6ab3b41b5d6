"""Hygiene of training data: exact duplicates and near duplicates.

Two conversations are exact duplicates if all that they hold is equal. They are near duplicates if
the sets of their phrases of three words have a Jaccard similarity of at least a threshold: MinHash
with locality-sensitive hashing (Broder, 1997) proposes the pairs, and the sets themselves decide.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, Literal
from zlib import crc32

from .chat import Example
from .chat_template import REASONING_NAMES
from .images import content_text
from .messages import Conversation

DuplicateMode = Literal["none", "exact", "near"]
DuplicateKind = Literal["exact", "near"]

PHRASE_WORDS = 3
NUM_PERMUTATIONS = 128
HASHED_AT_ONCE = 4096  # phrases; each needs a row of permutations
WORD = re.compile(r"\w+")


def list_texts(conversation: Conversation | Example) -> list[str]:
    """Return the texts of a conversation in their order: contents, reasoning and tool calls;
    none for token ids.
    """
    if isinstance(conversation, Example):
        return []
    if conversation.text is not None:
        return [conversation.text, *filter(None, [conversation.completion])]
    texts = []
    for message in conversation.messages:
        texts += [message[name] for name in REASONING_NAMES if message.get(name)]
        texts.append(content_text(message.get("content") or ""))
        texts += [
            json.dumps(call["function"], ensure_ascii=False)
            for call in message.get("tool_calls", ())
        ]
    return [text for text in texts if text]


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return WORD.findall(text.lower())


def hash_content(conversation: Conversation | Example) -> str:
    """Return a hash of all that a conversation holds; generated token ids beside their text do
    not count.
    """
    if isinstance(conversation, Example):
        return conversation.content_hash
    row = {
        **conversation.to_row(),
        "text": conversation.text,
        "completion": conversation.completion,
    }
    row.pop("answer_ids", None)
    return blake2b(
        json.dumps(row, sort_keys=True, default=str).encode(), digest_size=16
    ).hexdigest()


def hash_phrases(conversation: Conversation | Example) -> set[int]:
    """Return 32-bit hashes of the phrases of three words; of three token ids where there is no
    text.
    """
    if isinstance(conversation, Example):
        words = list(map(str, conversation.tokens))
    else:
        words = split_words("\n".join(list_texts(conversation)))
    return {crc32(phrase.encode()) for phrase in iterate_phrases(words, PHRASE_WORDS)} or {
        crc32(" ".join(words).encode())
    }


def iterate_phrases(words: list[str], length: int) -> Iterator[str]:
    """Yield every run of `length` words."""
    return (" ".join(words[at : at + length]) for at in range(len(words) - length + 1))


class DuplicateIndex:
    """The conversations that were added so far, by content and, for near duplicates, by phrases."""

    def __init__(self, mode: DuplicateMode, threshold: float) -> None:
        self.mode, self.threshold = mode, threshold
        self.hashes: set[str] = set()
        # The phrases of each conversation, by its number in `lsh`.
        self.phrases: list[array[int]] = []
        self.lsh: Any = None
        self.empty_signature: Any = None

    def add(self, conversation: Conversation | Example) -> DuplicateKind | None:
        """Add a conversation; return its kind of duplicate where it is one of an earlier
        conversation.
        """
        if self.mode == "none":
            return None
        content_hash = hash_content(conversation)
        if content_hash in self.hashes:
            return "exact"
        self.hashes.add(content_hash)
        return self._add_phrases(hash_phrases(conversation)) if self.mode == "near" else None

    def _add_phrases(self, phrases: set[int]) -> DuplicateKind | None:
        from datasketch import MinHash, MinHashLSH

        if self.lsh is None:
            # The sets decide afterwards, so that a missed pair costs more than a needless one.
            proposing = max(0.1, self.threshold - 0.1)
            self.lsh = MinHashLSH(
                threshold=proposing, num_perm=NUM_PERMUTATIONS, weights=(0.2, 0.8)
            )
            self.empty_signature = MinHash(NUM_PERMUTATIONS, hashfunc=int)
        signature = self.empty_signature.copy()
        listed = sorted(phrases)
        for start in range(0, len(listed), HASHED_AT_ONCE):
            signature.update_batch(listed[start : start + HASHED_AT_ONCE])
        if any(
            jaccard(phrases, set(self.phrases[number])) >= self.threshold
            for number in self.lsh.query(signature)
        ):
            return "near"
        self.lsh.insert(len(self.phrases), signature)
        self.phrases.append(array("I", listed))
        return None


def jaccard(first: set[int], second: set[int]) -> float:
    """Return the size of the intersection divided by that of the union."""
    return len(first & second) / len(first | second)
