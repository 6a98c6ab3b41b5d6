"""Overlap of training data with the prompts of a scoring: a conversation is contaminated if one of
its texts shares 13 words in a row with a prompt (Brown et al., 2020, appendix C).
"""

from __future__ import annotations

from collections.abc import Iterable

from spectrain.data.hygiene import iterate_phrases, split_words

SHARED_WORDS = 13


class PromptIndex:
    """The texts of scored prompts by their runs of 13 words; a shorter text counts where a
    conversation repeats it alone.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.num_texts = 0
        self.runs: dict[str, set[int]] = {}
        self.short_texts: dict[str, set[int]] = {}
        for number, text in enumerate(texts):
            self.num_texts += 1
            words = split_words(text)
            if len(words) < SHARED_WORDS:
                self.short_texts.setdefault(" ".join(words), set()).add(number)
            for run in iterate_phrases(words, SHARED_WORDS):
                self.runs.setdefault(run, set()).add(number)

    def find_overlap(self, texts: Iterable[str]) -> set[int]:
        """Return the numbers of the prompts that these texts of a conversation overlap with."""
        numbers: set[int] = set()
        for words in map(split_words, texts):
            numbers |= self.short_texts.get(" ".join(words), set())
            for run in iterate_phrases(words, SHARED_WORDS):
                numbers |= self.runs.get(run, set())
        return numbers
