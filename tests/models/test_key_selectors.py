"""Which tokens a draft reads: each way to choose against plain Python."""

import torch

from spectrain.experimental.less_cache.key_selectors import (
    POOL_SIZE,
    QuestSelector,
    SelectionInput,
    SnapKVSelector,
    StreamingLLMSelector,
)

LENGTHS = torch.tensor([41, 30])
KEYS = 2  # heads
GROUP = 2


def seen(num_queries: int) -> SelectionInput:
    """Random keys of two texts, and what their newest tokens ask."""
    queries = torch.randn(2, KEYS, GROUP, num_queries, 8)
    return SelectionInput(torch.randn(2, int(LENGTHS.max()), KEYS, 8), LENGTHS, queries)


def chosen(chooser: StreamingLLMSelector | SnapKVSelector | QuestSelector, what: SelectionInput) -> list[list[list[int]]]:
    """The chosen tokens of every text and head, in their order."""
    counts = chooser.count_selected(what.lengths)
    places = chooser.select_keys(0, what, counts)
    assert places.shape[2] == int(counts.max())
    return [[head[: int(count)].tolist() for head in row] for row, count in zip(places, counts)]


def test_a_window_has_the_first_tokens_and_the_newest() -> None:
    for row, length in zip(chosen(StreamingLLMSelector(12, 4), seen(1)), LENGTHS.tolist()):
        assert row == [[0, 1, 2, 3, *range(length - 8, length)]] * KEYS


def test_a_budget_of_the_full_text_selects_every_key() -> None:
    for chooser, queries in ((StreamingLLMSelector(64, 4), 1), (SnapKVSelector(64, 6), 6), (QuestSelector(64, 8), 1)):
        for row, length in zip(chosen(chooser, seen(queries)), LENGTHS.tolist()):
            assert [sorted(head) for head in row] == [list(range(length))] * KEYS


def test_votes_are_attention() -> None:
    """Chosen are the queries' own tokens and, of the others, those with the most attention around them."""
    what = seen(6)
    assert what.queries is not None
    for row, heads in enumerate(chosen(SnapKVSelector(16, 6), what)):
        length = int(LENGTHS[row])
        for head, found in enumerate(heads):
            votes = torch.zeros(length)
            for group in range(GROUP):
                for number in range(6):
                    own = length - 6 + number
                    scores = what.keys[row, : own + 1, head] @ what.queries[row, head, group, number]
                    votes[: own + 1] += scores.softmax(0)
            around = [float(votes[max(0, t - POOL_SIZE // 2) : t + POOL_SIZE // 2 + 1].sum()) for t in range(length - 6)]
            best = sorted(range(length - 6), key=lambda t: -around[t])[:10]
            assert set(found) == {*best, *range(length - 6, length)}


def test_pages_are_chosen_by_bounds_that_hold() -> None:
    """No key of a page scores above its bound, and chosen are the newest page and those with the highest bounds."""
    what = seen(1)
    assert what.queries is not None
    for row, heads in enumerate(chosen(QuestSelector(17, 4), what)):
        length = int(LENGTHS[row])
        pages = length // 4
        for head, found in enumerate(heads):
            bounds = []
            for page in range(pages):
                keys = what.keys[row, 4 * page : 4 * page + 4, head]
                bound = 0.0
                for query in what.queries[row, head, :, 0]:
                    most = float(torch.maximum(query * keys.amin(0), query * keys.amax(0)).sum())
                    assert (keys @ query <= most + 1e-5).all()
                    bound += most
                bounds.append(bound)
            best = sorted(range(pages - 1), key=lambda page: -bounds[page])[:3]
            tokens = {4 * page + step for page in (*best, pages - 1) for step in range(4)}
            assert set(found) == tokens | {*range(4 * pages, length)} and len(found) == len(set(found))


def test_bounds_of_full_pages_are_cached() -> None:
    """Chosen from the text as it grows or all at once: the same; what grows is read once."""
    what, growing, lengths = seen(1), QuestSelector(8, 4), torch.tensor([22, 18])
    growing.select_keys(0, what._replace(lengths=lengths), growing.count_selected(lengths))
    assert growing.selection_bytes(0, what) == (10 - 4 + 7 - 4) * 4 * what.token_bytes + 2 * (10 + 7) * what.token_bytes
    assert chosen(growing, what) == chosen(QuestSelector(8, 4), what)
