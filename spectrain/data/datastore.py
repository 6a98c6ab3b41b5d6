"""A store of texts that drafts are copied from: its tokens, their suffix array, and hashes of what was asked and answered.

N tokens. Everything is memory-mapped, and nothing that is read is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import numpy as np

from spectrain.errors import UserError
from spectrain.files import written
from spectrain.settings.saved import read_object

LONGEST = 16  # tokens that suffixes are sorted by, so that no longer match can be looked for
END = -1  # between two texts
ARRAYS = {"tokens": np.int32, "suffixes": np.int32, "questions": np.uint64, "answers": np.uint64, "phrases": np.uint64}
PHRASE = 5  # words
FACTS = "index.json"


def suffix_array(tokens: np.ndarray, longest: int = LONGEST) -> np.ndarray:
    """[N] all places, in the order of the `longest` tokens from there on and, where these are equal, of the text.

    Prefix doubling: the order by 2k tokens is that of the ranks by k tokens here and k further on.
    """
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64) + 1
    size = 1
    while size < longest:
        pairs = rank * (len(rank) + 2)
        pairs[:-size] += rank[size:]
        rank = np.unique(pairs, return_inverse=True)[1].astype(np.int64) + 1
        size *= 2
    return np.argsort(rank, kind="stable").astype(np.int32)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def text_hash(text: str) -> int:
    """Of a text's words: case, spaces and signs make no difference."""
    return int.from_bytes(blake2b(" ".join(words(text)).encode(), digest_size=8).digest())


def phrase_hashes(text: str) -> set[int]:
    """Of every phrase of five words in a text; of the whole text, where it has fewer."""
    said = words(text)
    return {text_hash(" ".join(said[at : at + PHRASE])) for at in range(max(1, len(said) - PHRASE + 1))}


class Datastore:
    """A store as `spectrain data index` wrote it."""

    def __init__(self, folder: str, tokenizer: Any) -> None:
        self.folder = Path(folder).expanduser()
        if not (self.folder / FACTS).is_file():
            raise UserError(f"drafter.store={folder}: there is no store; write one with spectrain data index out={folder}")
        self.facts = read_object(self.folder / FACTS)
        if self.facts.get("tokenizer") != vocabulary_hash(tokenizer):
            raise UserError(
                f"drafter.store={folder}: its texts were cut by another tokenizer; index them again with this target"
            )
        self.tokens, self.suffixes, self.questions, self.answers, self.phrases = map(self._array, ARRAYS)
        size = len(self.tokens)
        sound = len(self.suffixes) == size and (not size or (self.suffixes.min() >= 0 and self.suffixes.max() < size))
        if not sound or (size and (self.tokens.min() < END or self.tokens.max() >= len(tokenizer))):
            raise UserError(f"drafter.store={folder}: its arrays do not belong together; index the data again")

    def _array(self, name: str) -> np.ndarray:
        path = self.folder / f"{name}.npy"
        try:
            found: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: it cannot be read ({error}); index the data again") from error
        if found.dtype != ARRAYS[name] or found.ndim != 1:
            raise UserError(f"{path}: it is no list of {np.dtype(ARRAYS[name])}; index the data again")
        return np.asarray(found)  # still mapped; cut as an array, which takes a tenth of the time

    def occurrences(self, text: list[int], depth: int, most: int, enough: int) -> Iterator[tuple[int, list[int]]]:
        """How many of a text's last tokens match, and what followed: the longest matches first, shorter ones until there are
        `enough`, of too many of one length evenly spread ones, at most `most` in all, each place once."""
        length = self.longest_match(text)
        seen: set[int] = set()
        while length and len(seen) < enough:
            low, high = (self._bound(text[-length:], right) for right in (False, True))
            room = most - len(seen)
            spread = range(low, high) if high - low <= room else np.linspace(low, high - 1, room).astype(np.int64)
            for end in sorted({int(self.suffixes[at]) + length for at in spread} - seen):
                seen.add(end)
                tokens = self.tokens[end : end + depth].tolist()
                tokens = tokens[: tokens.index(END)] if END in tokens else tokens
                if tokens:
                    yield length, tokens
            length -= 1

    def longest_match(self, text: list[int]) -> int:
        """How many of a text's last tokens stand together somewhere in the store, at most 16: if n do, fewer do."""
        low, high = 0, min(LONGEST, len(text))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.holds(text[-middle:]) else (low, middle - 1)
        return low

    def holds(self, tokens: list[int]) -> bool:
        """Whether tokens, of any number, stand together somewhere in the store."""
        first, last = (self._bound(tokens[:LONGEST], right) for right in (False, True))
        starts = (int(self.suffixes[at]) for at in range(first, last))
        return any(self.tokens[start : start + len(tokens)].tolist() == tokens for start in starts)

    def _bound(self, tokens: list[int], right: bool) -> int:
        """How many suffixes come before those that begin with up to 16 tokens or, `right`, before what comes behind them."""
        low, high = 0, len(self.suffixes)
        while low < high:
            middle = (low + high) // 2
            start = int(self.suffixes[middle])
            here = self.tokens[start : start + len(tokens)].tolist()
            low, high = (middle + 1, high) if here < tokens or (right and here == tokens) else (low, middle)
        return low


def vocabulary_hash(tokenizer: Any) -> str:
    return blake2b(json.dumps(sorted(tokenizer.get_vocab().items())).encode(), digest_size=8).hexdigest()


def write_store(
    folder: Path, texts: Iterable[list[int]], asked: Iterable[str], answered: Iterable[str], facts: dict[str, Any]
) -> int:
    """Write a store, whole or not at all; the number of its tokens."""
    tokens = np.fromiter((token for text in texts for token in (*text, END)), dtype=np.int32)
    asked = list(asked)
    phrases = sorted(set().union(*map(phrase_hashes, asked)))
    hashes = {"questions": sorted(set(map(text_hash, asked))), "answers": sorted(set(map(text_hash, answered)))}
    arrays = {"tokens": tokens, "suffixes": suffix_array(tokens), "phrases": phrases, **hashes}
    with written(folder, folder=True) as scratch:
        for name, kind in ARRAYS.items():
            np.save(scratch / f"{name}.npy", np.asarray(arrays[name], dtype=kind))
        facts = {**facts, "tokens": len(tokens), "tokens_sha256": sha256(tokens.tobytes()).hexdigest()}
        (scratch / FACTS).write_text(json.dumps(facts, indent=2) + "\n")
    return len(tokens)
