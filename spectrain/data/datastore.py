"""A store of texts that drafters copy from: tokens, their suffix array, and hashes of the questions
and answers.

N is the number of tokens. All arrays are memory-mapped, and nothing that is read is executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import numpy as np

from spectrain.config.plain_files import read_json_object
from spectrain.copying.suffixes import MAX_MATCH, TEXT_END, SuffixIndex
from spectrain.errors import UserError, first_line
from spectrain.kernels.dispatch import run_on_cpu

ARRAY_DTYPES = {
    "tokens": np.int32,
    "suffixes": np.int32,
    "questions": np.uint64,
    "answers": np.uint64,
    "phrases": np.uint64,
}
PHRASE_WORDS = 5  # words
INDEX_FILE = "index.json"
CHECKSUMS = "arrays_sha256"


def build_suffix_array(tokens: np.ndarray, max_match: int = MAX_MATCH) -> np.ndarray:
    """Return all positions [N], sorted by the `max_match` tokens that start there; equal ones keep
    the order of the text.

    Prefix doubling: the order by 2k tokens follows from the ranks by k tokens here and k tokens
    later.
    """
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64) + 1
    size = 1
    while size < max_match:
        pairs = rank * (len(rank) + 2)
        pairs[:-size] += rank[size:]
        rank = np.unique(pairs, return_inverse=True)[1].astype(np.int64) + 1
        size *= 2
    return np.argsort(rank, kind="stable").astype(np.int32)


def split_words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def hash_text(text: str) -> int:
    """Hash the words of a text; case, spaces and punctuation make no difference."""
    return int.from_bytes(blake2b(" ".join(split_words(text)).encode(), digest_size=8).digest())


def hash_phrases(text: str) -> set[int]:
    """Hash every phrase of five words in a text; a shorter text gives one hash."""
    text_words = split_words(text)
    return {
        hash_text(" ".join(text_words[at : at + PHRASE_WORDS]))
        for at in range(max(1, len(text_words) - PHRASE_WORDS + 1))
    }


class Datastore(SuffixIndex):
    """A store that `spectrain data index` wrote."""

    def __init__(self, folder: str, tokenizer: Any) -> None:
        self.folder = Path(folder).expanduser()
        if not (self.folder / INDEX_FILE).is_file():
            raise UserError(
                f"drafter.store={folder}: there is no store; write one with spectrain data index "
                f"out={folder}"
            )
        self.facts = read_json_object(self.folder / INDEX_FILE)
        if self.facts.get("tokenizer") != hash_vocabulary(tokenizer):
            raise UserError(
                f"drafter.store={folder}: its texts were cut by another tokenizer; index them "
                "again with this target"
            )
        tokens, suffixes, self.questions, self.answers, self.phrases = map(
            self._load_array, ARRAY_DTYPES
        )
        super().__init__(tokens, suffixes)
        # A store of an earlier version has no checksums.
        checksums = self.facts.get(CHECKSUMS)
        for name in ARRAY_DTYPES if checksums is not None else ():
            if not isinstance(checksums, dict) or checksums.get(name) != hash_array(
                getattr(self, name)
            ):
                raise UserError(
                    f"{self.folder / name}.npy: it is damaged: its checksum differs; index the "
                    "data again"
                )
        size = len(self.tokens)
        sound = len(self.suffixes) == size and (
            not size or (self.suffixes.min() >= 0 and self.suffixes.max() < size)
        )
        if not sound or (
            size and (self.tokens.min() < TEXT_END or self.tokens.max() >= len(tokenizer))
        ):
            raise UserError(
                f"drafter.store={folder}: its arrays do not belong together; index the data again"
            )

    def _load_array(self, name: str) -> np.ndarray:
        path = self.folder / f"{name}.npy"
        array = load_array(path, "index the data again")
        if array.dtype != ARRAY_DTYPES[name] or array.ndim != 1:
            raise UserError(
                f"{path}: it is no list of {np.dtype(ARRAY_DTYPES[name])}; index the data again"
            )
        # It stays memory-mapped; slicing a plain array takes a tenth of the time.
        return np.asarray(array)

    def find_continuations(
        self, text: list[int], depth: int, max_matches: int, min_matches: int
    ) -> tuple[np.ndarray, np.ndarray]:
        found: tuple[np.ndarray, np.ndarray] | None = run_on_cpu(
            "search_store", self.tokens, self.suffixes, text, depth, max_matches, min_matches
        )
        if found is not None:
            return found
        return super().find_continuations(text, depth, max_matches, min_matches)


def load_array(path: Path, remedy: str) -> np.ndarray:
    """Return the array of a file, which stays memory-mapped; a UserError names a file that is
    none, with the remedy.
    """
    try:
        if not path.is_file():
            raise ValueError("there is no such file")
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("it is an archive")
    # A header is any literal of Python, and numpy counts by what it says.
    except Exception as error:
        raise UserError(f"{path}: it cannot be read ({first_line(error)}); {remedy}") from error
    return array


def hash_array(array: np.ndarray) -> str:
    """Return the SHA-256 of an array's values."""
    content: Any = np.ascontiguousarray(array).view(np.uint8)
    return sha256(content).hexdigest()


def hash_vocabulary(tokenizer: Any) -> str:
    return blake2b(
        json.dumps(sorted(tokenizer.get_vocab().items())).encode(), digest_size=8
    ).hexdigest()


def write_store(
    folder: Path,
    texts: Iterable[list[int]],
    questions: Iterable[str],
    answers: Iterable[str],
    facts: dict[str, Any],
) -> int:
    """Write the files of a store into a folder and return the number of its tokens. Whoever calls
    it writes the folder under another name and renames it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.fromiter((token for text in texts for token in (*text, TEXT_END)), dtype=np.int32)
    questions = list(questions)
    phrases = sorted(set().union(*map(hash_phrases, questions)))
    hashes = {
        "questions": sorted(set(map(hash_text, questions))),
        "answers": sorted(set(map(hash_text, answers))),
    }
    arrays = {
        "tokens": tokens,
        "suffixes": build_suffix_array(tokens),
        "phrases": phrases,
        **hashes,
    }
    checksums = {}
    for name, kind in ARRAY_DTYPES.items():
        array = np.asarray(arrays[name], dtype=kind)
        np.save(folder / f"{name}.npy", array)
        checksums[name] = hash_array(array)
    facts = {
        **facts,
        "tokens": len(tokens),
        "tokens_sha256": checksums["tokens"],
        CHECKSUMS: checksums,
    }
    (folder / INDEX_FILE).write_text(json.dumps(facts, indent=2) + "\n")
    return len(tokens)
