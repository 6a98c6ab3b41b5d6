"""Which tokens a draft reads: each way to choose against plain Python."""

import torch

from spectrain_research.less_cache.key_selectors import (
    POOL_SIZE,
    KeySelector,
    QuestSelector,
    SelectionInput,
    SnapKVSelector,
    StreamingLLMSelector,
)
from spectrain_research.less_cache.ragged_selectors import (
    DefensiveKVSelector,
    KVCompressSelector,
    mask_unselected,
)
from spectrain_research.less_cache.retrieval_selectors import (
    NUM_SINKS,
    ClusterSelector,
    SignSelector,
    cluster_keys,
    round_to_signs,
)

LENGTHS = torch.tensor([41, 30])
KEYS = 2  # heads
GROUP = 2


def make_input(num_queries: int) -> SelectionInput:
    """Return random keys of two texts and queries of their newest tokens."""
    queries = torch.randn(2, KEYS, GROUP, num_queries, 8)
    return SelectionInput(torch.randn(2, int(LENGTHS.max()), KEYS, 8), LENGTHS, queries)


def select_tokens(selector: KeySelector, inputs: SelectionInput) -> list[list[list[int]]]:
    """The chosen tokens of every text and head, in their order."""
    counts = selector.count_selected(inputs.lengths)
    positions = selector.select_keys(0, inputs, counts)
    assert positions.shape[2] == int(counts.max())
    return [[head[: int(count)].tolist() for head in row] for row, count in zip(positions, counts)]


def test_a_window_has_the_first_tokens_and_the_newest() -> None:
    for row, length in zip(
        select_tokens(StreamingLLMSelector(12, 4), make_input(1)), LENGTHS.tolist()
    ):
        assert row == [[0, 1, 2, 3, *range(length - 8, length)]] * KEYS


def test_a_budget_of_the_full_text_selects_every_key() -> None:
    for selector, queries in (
        (StreamingLLMSelector(64, 4), 1),
        (SnapKVSelector(64, 6), 6),
        (QuestSelector(64, 8), 1),
    ):
        for row, length in zip(select_tokens(selector, make_input(queries)), LENGTHS.tolist()):
            assert [sorted(head) for head in row] == [list(range(length))] * KEYS


def test_votes_are_attention() -> None:
    """Chosen are the queries' own tokens and, of the others, those with the most attention
    around them.
    """
    inputs = make_input(6)
    assert inputs.queries is not None
    for row, heads in enumerate(select_tokens(SnapKVSelector(16, 6), inputs)):
        length = int(LENGTHS[row])
        for head, selected in enumerate(heads):
            votes = torch.zeros(length)
            for group in range(GROUP):
                for number in range(6):
                    own = length - 6 + number
                    scores = (
                        inputs.keys[row, : own + 1, head] @ inputs.queries[row, head, group, number]
                    )
                    votes[: own + 1] += scores.softmax(0)
            around = [
                float(votes[max(0, t - POOL_SIZE // 2) : t + POOL_SIZE // 2 + 1].sum())
                for t in range(length - 6)
            ]
            best = sorted(range(length - 6), key=lambda t: -around[t])[:10]
            assert set(selected) == {*best, *range(length - 6, length)}


def test_pages_are_chosen_by_bounds_that_hold() -> None:
    """No key of a page scores above its bound, and chosen are the newest page and those with the
    highest bounds.
    """
    inputs = make_input(1)
    assert inputs.queries is not None
    for row, heads in enumerate(select_tokens(QuestSelector(17, 4), inputs)):
        length = int(LENGTHS[row])
        pages = length // 4
        for head, selected in enumerate(heads):
            bounds = []
            for page in range(pages):
                keys = inputs.keys[row, 4 * page : 4 * page + 4, head]
                bound = 0.0
                for query in inputs.queries[row, head, :, 0]:
                    most = float(torch.maximum(query * keys.amin(0), query * keys.amax(0)).sum())
                    assert (keys @ query <= most + 1e-5).all()
                    bound += most
                bounds.append(bound)
            best = sorted(range(pages - 1), key=lambda page: -bounds[page])[:3]
            tokens = {4 * page + step for page in (*best, pages - 1) for step in range(4)}
            assert set(selected) == tokens | {*range(4 * pages, length)} and len(selected) == len(
                set(selected)
            )


def test_bounds_of_full_pages_are_cached() -> None:
    """Chosen from the text as it grows or all at once: the same; what grows is read once."""
    inputs = make_input(1)
    growing = QuestSelector(8, 4)
    lengths = torch.tensor([22, 18])
    growing.select_keys(0, inputs._replace(lengths=lengths), growing.count_selected(lengths))
    assert (
        growing.selection_bytes(0, inputs)
        == (10 - 4 + 7 - 4) * 4 * inputs.token_bytes + 2 * (10 + 7) * inputs.token_bytes
    )
    assert select_tokens(growing, inputs) == select_tokens(QuestSelector(8, 4), inputs)


def test_signs_stand_for_keys() -> None:
    """Of eight tokens with keys of one channel: a key is the nearer of two levels in its group, and
    the tokens with the highest scores are chosen, the newest always."""
    keys = torch.tensor([0.0, 4.0, 3.0, 1.0, -8.0, 8.0, 7.0, -2.0])[None, :, None, None]
    assert round_to_signs(keys, 4).flatten().tolist() == [1, 3, 3, 1, -4, 4, 4, -4]
    query = torch.ones(1, 1, 1, 1, 1)
    for sign, expected in ((1.0, {5, 6, 7}), (-1.0, {4, 7, 0, 3})):
        inputs = SelectionInput(keys, torch.tensor([8]), sign * query)
        assert set(select_tokens(SignSelector(len(expected), 4), inputs)[0][0]) == expected


def test_heads_share_a_threshold() -> None:
    """One head attends to a single token and the other to all alike: of four tokens for the two,
    besides the observed ones, the first takes one and the second the rest, whose other slots are
    hidden."""
    keys = torch.zeros(1, 8, 2, 1)
    keys[0, 0, 0] = 9.0
    selector = KVCompressSelector(3, 1)
    inputs = SelectionInput(keys, torch.tensor([8]), torch.ones(1, 2, 1, 1, 1))
    selector.count_votes = lambda weights: weights.sum((2, 3)) * torch.tensor([1, 0.9])[:, None]  # type: ignore
    selector.plan_budgets({0: inputs})
    counts = selector.head_counts[0]
    votes = selector.votes[0][0]
    best = sorted(((float(vote), head) for head in (0, 1) for vote in votes[head]), reverse=True)[
        :6
    ]
    assert (
        counts[0].tolist() == [sum(head == number for _, head in best) for number in (0, 1)]
        and counts.sum() == 6
    )
    assert counts[0, 0] != counts[0, 1]
    visible = mask_unselected(counts, counts.amax(1), 8)[0]
    width = int(counts.max())
    assert [row[:width].sum() for row in visible] == counts[0].tolist() and visible[:, width:].all()


def test_the_worst_case_votes() -> None:
    """A token that one of many queries needs has that query's vote, and one that none needs half
    the mean.
    """
    weights = torch.zeros(1, 1, 1, 4, 8)
    weights[0, 0, 0, :, 0], weights[0, 0, 0, 3, 5] = 0.9, 0.8
    votes = DefensiveKVSelector(4, 1).count_votes(weights)[0, 0]
    floor = (0.9 + 0.8) / 8 / 2
    expected = torch.tensor([0.9, *[floor] * 4, 0.8, *[floor] * 2])
    torch.testing.assert_close(votes, expected / expected.sum())


def test_clusters_are_chosen_by_their_centroids() -> None:
    """Keys in two directions make two clusters; the query's takes the budget, after the sinks
    and what is in no cluster.
    """
    keys = torch.tensor([[1.0, 0.1], [0.1, 1.0]]).repeat(4, 1)
    labels, centroids = cluster_keys(keys[None, None], 2)
    assert labels[0, 0].tolist() == [0, 1] * 4 or labels[0, 0].tolist() == [1, 0] * 4
    torch.testing.assert_close(centroids[0, 0, labels[0, 0]], keys)
    length = NUM_SINKS + 320 + 5
    text = (
        torch.randn(length, 2) * 0.01
        + torch.tensor([[1.0, 0.0], [0.0, 1.0]])[torch.arange(length) % 2]
    )
    selector = ClusterSelector(40)
    inputs = SelectionInput(
        text[None, :, None],
        torch.tensor([length]),
        torch.tensor([0.0, 1.0])[None, None, None, None],
    )
    select_tokens(
        selector, inputs._replace(keys=inputs.keys[:, :-5], lengths=torch.tensor([length - 5]))
    )
    (tokens,) = select_tokens(selector, inputs)[0]
    clustered = [token for token in tokens if NUM_SINKS <= token < NUM_SINKS + 320]
    assert {*range(NUM_SINKS), *range(NUM_SINKS + 320, length)} <= set(tokens) and len(
        clustered
    ) == 40
    assert all(token % 2 for token in clustered)
