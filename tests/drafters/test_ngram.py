"""N-gram lookup reads only new tokens, and finds what a search of the full text finds."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from spectrain.config.build import GroupSpec
from spectrain.copying.occurrences import IndexedText
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from tests.decoding.rounds import placed, proposed
from tests.trees.tables import check_structure


def continue_text(tokens: Sequence[int], end: int, depth: int) -> list[int]:
    """Return the tokens that follow a position, copied past the text's end if need be."""
    longer = list(tokens)
    for step in range(depth):
        longer.append(longer[end + step])
    return longer[end : end + depth]


def search_text(
    tokens: list[int], depth: int, longest: int, shortest: int, most: int = 64
) -> list[tuple[int, list[int]]]:
    """By trying all, find every earlier position that matches the text's end: how many tokens
    match, and what follows.
    """
    matches = []
    for end in range(1, len(tokens)):
        sizes = [
            n
            for n in range(shortest, min(longest, end) + 1)
            if tokens[end - n : end] == tokens[len(tokens) - n :]
        ]
        if sizes:
            matches.append((-max(sizes), -end))
    return [(-length, continue_text(tokens, -end, depth)) for length, end in sorted(matches)[:most]]


def heaviest_path(matches: list[tuple[int, list[int]]], depth: int) -> list[int]:
    """Return the path that always takes the token with the largest total weight below it, of
    equals the first.
    """
    path: list[int] = []
    while len(path) < depth:
        weights: dict[int, float] = defaultdict(float)
        for rank, (length, tokens) in enumerate(matches):
            if tokens[: len(path)] == path:
                weights[tokens[len(path)]] += 2.0**length * 0.97**rank
        if not weights:
            break
        path.append(max(weights, key=lambda token: weights[token]))
    return path


@pytest.mark.parametrize("longest, shortest, most", [(3, 1, 64), (2, 2, 64), (5, 2, 64), (3, 1, 4)])
def test_a_growing_index_equals_a_search(longest: int, shortest: int, most: int) -> None:
    """Over a text that grows by a few tokens at a time, the index finds what a full search finds
    each time.
    """
    text = IndexedText([1], longest)
    for step in range(60):
        text.tokens += torch.randint(0, 4, (step % 5,)).tolist()
        matches = text.find_occurrences(4, most, shortest)
        assert [(match.length, match.tokens) for match in matches] == search_text(
            text.tokens, 4, longest, shortest, most
        )


def test_a_copy_goes_on_past_the_texts_end(shallow: Target) -> None:
    """A text that repeats itself is drafted to the full depth, however close to its end the
    match is.
    """
    builder = Chain(6)
    tree = proposed(Ngram(shallow), placed(shallow, [[9, 5, 6, 5, 6]], builder), builder)
    assert tree.tokens.tolist() == [[6, 5, 6, 5, 6, 5, 6]]


def test_all_matches_share_a_tree(shallow: Target) -> None:
    """What followed every earlier match branches below the root, the heaviest nodes first; a
    chain stays a chain.
    """
    text = [5, 7, 1, 5, 8, 2, 5, 7, 3, 5]
    wide = Eagle2(depth=2, budget=6)
    chain = Chain(2)
    tree = proposed(Ngram(shallow), placed(shallow, [text], wide), wide)
    check_structure(tree)
    above = tree.parents[0].tolist()
    paths = {
        (tree.tokens[0, above[node]].item(), tree.tokens[0, node].item())
        for node in range(1, tree.tokens.shape[1])
    }
    assert paths == {(5, 7), (5, 8), (7, 3), (8, 2), (7, 1)}
    assert proposed(Ngram(shallow), placed(shallow, [text], chain), chain).tokens.tolist() == [
        [5, 7, 3]
    ]
    small = Eagle2(depth=2, budget=3)
    assert proposed(Ngram(shallow), placed(shallow, [text], small), small).tokens.tolist() == [
        [5, 7, 3]
    ]


def test_rounds_and_rows_stay_separate(shallow: Target) -> None:
    """Each row of a ragged batch is looked up in its own text, a row may have no new tokens, and
    round 0 starts afresh.
    """
    drafter = Ngram(shallow)
    for _ in range(2):  # the second decoding starts afresh
        texts = [torch.randint(0, 4, (length,)).tolist() for length in (9, 1, 5)]
        news = [0, 0, 0]
        for round in range(8):
            builder = Chain(3)
            tree = proposed(drafter, placed(shallow, texts, builder, news, round), builder)
            for text, tokens, valid in zip(texts, tree.tokens.tolist(), tree.valid.tolist()):
                assert tokens[: sum(valid)] == [
                    text[-1],
                    *heaviest_path(search_text(text, 3, 3, 1), 3),
                ]
            news = [1 + round % 3, 2, 0]
            texts = [
                text + torch.randint(0, 4, (count,)).tolist() for text, count in zip(texts, news)
            ]


class CountedText(list[int]):
    """Tokens that count how many of them were read."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        tokens = super().__getitem__(index)
        self.num_read += len(tokens) if isinstance(tokens, list) else 1
        return tokens

    def __iter__(self) -> Iterator[int]:
        self.num_read += len(self)
        return super().__iter__()


def test_a_long_text_costs_no_more() -> None:
    """A lookup at the end of 20000 indexed tokens reads fewer than 20 of them."""
    tokens = CountedText(torch.randint(0, 4000, (20000,)).tolist())
    text = IndexedText(tokens, 3)
    text.find_occurrences(4, 64)
    assert tokens.num_read > 20000
    for token in range(20):
        tokens.append(5000 + token)  # a new token: a search would read the text three times
        tokens.num_read = 0
        assert text.find_occurrences(4, 64) == [] and 0 < tokens.num_read < 20


@pytest.mark.parametrize(
    "options", [{"longest": 0}, {"shortest": 0}, {"shortest": 4}, {"matches": 0}]
)
def test_wrong_settings_are_refused(shallow: Target, options: dict[str, int]) -> None:
    with pytest.raises(UserError, match="drafter.*: use 1"):
        GroupSpec("drafter", "ngram", options).build(target=shallow)
