"""Prompt lookup reads only what is new, and finds what a search of the whole text finds."""

import time

import pytest
import torch

from spectrain.drafters.ngram import Index, Ngram
from spectrain.models.target import Target
from spectrain.trees import Chain
from tests.decoding.rounds import placed, proposed


def searched(tokens: list[int], depth: int, longest: int, shortest: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest suffix that has one, by trying every place."""
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                return tokens[start + size : start + size + depth]
    return []


@pytest.mark.parametrize("longest, shortest", [(3, 1), (2, 2), (5, 2)])
def test_a_kept_index_equals_a_search(tiny: Target, longest: int, shortest: int) -> None:
    """Over a text that grows by a few tokens at a time, the index gives what a search gives each time."""
    drafter, index, tokens = Ngram(tiny, longest, shortest), Index(), [1]
    for step in range(60):
        tokens += torch.randint(0, 4, (step % 5,)).tolist()
        assert drafter._lookup(tokens, 4, index) == searched(tokens, 4, longest, shortest)


def test_rounds_and_rows_are_kept_apart(tiny: Target) -> None:
    """Each row of a ragged batch is looked up in its own text, a row may stand still, and round 0 forgets everything."""
    drafter = Ngram(tiny)
    for _ in range(2):  # the second decoding begins anew
        texts = [torch.randint(0, 4, (length,)).tolist() for length in (9, 1, 5)]
        news = [0, 0, 0]
        for round in range(8):
            builder = Chain(3)
            tree = proposed(drafter, placed(tiny, texts, builder, news, round), builder)
            for text, tokens, valid in zip(texts, tree.tokens.tolist(), tree.valid.tolist()):
                assert tokens[: sum(valid)] == [text[-1], *searched(text, 3, 3, 1)]
            news = [1 + round % 3, 2, 0]
            texts = [text + torch.randint(0, 4, (count,)).tolist() for text, count in zip(texts, news)]


def test_a_long_text_costs_no_more(tiny: Target) -> None:
    """A lookup behind 20000 tokens that are known takes well below a millisecond."""
    drafter, index = Ngram(tiny), Index()
    tokens = torch.randint(0, 4000, (20000,)).tolist()
    drafter._lookup(tokens, 4, index)
    seconds = []
    for token in range(20):
        tokens.append(5000 + token)  # seen nowhere: a search would read all of the text, three times
        began = time.perf_counter()
        assert drafter._lookup(tokens, 4, index) == []
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 5e-4
