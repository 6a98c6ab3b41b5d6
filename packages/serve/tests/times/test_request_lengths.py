"""Draft tokens by request: the choice is the best of all, rates are told from noise, and what the
simulation gains comes from texts that differ.
"""

from itertools import product

import numpy as np
import pytest

from spectrain_serve.times import load
from spectrain_serve.times.load import TimeTable
from spectrain_serve.times.request_lengths import (
    DraftedRequest,
    RateDistribution,
    RoundCost,
    choose_lengths,
    count_drafts,
    simulate_request_lengths,
)

DEPTH = 3


@pytest.mark.parametrize("seed", range(8))
def test_no_other_lengths_give_more_tokens_per_second(seed: int) -> None:
    """Of all 256 combinations for four texts; a round's seconds depend on the longest draft and on
    the number of draft tokens.
    """
    random = np.random.default_rng(seed)
    survival = np.cumprod(random.uniform(0.1, 1.0, (4, DEPTH)), axis=1)
    cost = RoundCost(1.0, *random.uniform(0.0, 0.4, 2))

    def speed(lengths: tuple[int, ...]) -> float:
        gained = sum(survival[text, :length].sum() for text, length in enumerate(lengths))
        return (4 + gained) / cost.seconds(lengths)

    best = max(speed(lengths) for lengths in product(range(DEPTH + 1), repeat=4))
    assert speed(tuple(choose_lengths(survival, cost))) == pytest.approx(best)


def test_a_text_that_accepts_more_gets_the_longer_draft() -> None:
    """One that accepts nothing gets none, where rows cost time."""
    rates = RateDistribution(0.5, 4.0)
    survival = rates.survival([20, 0, 4], [20, 20, 8], DEPTH)
    lengths = choose_lengths(survival, RoundCost(1.0, 0.05, 0.15))
    assert lengths == sorted(lengths, key=lambda length: -survival[lengths.index(length), 0])
    assert lengths[0] == DEPTH and lengths[1] == 0


def test_equal_lengths_cost_what_was_measured() -> None:
    """With K tokens for every text it is the measured round, with none the step."""
    table = TimeTable(
        {1: 0.01, 4: 0.02}, {1: 0.013, 4: 0.05}, {1: [1.0]}, 0.0, [9], {1: 0.002, 4: 0.01}
    )
    for num_texts in (1, 2, 4):
        cost = RoundCost.read(table, num_texts, DEPTH)
        expected = table.interpolate(table.round_seconds, num_texts)
        assert cost.seconds([DEPTH] * num_texts) == pytest.approx(expected)
        assert cost.seconds([0] * num_texts) == table.interpolate(table.step_seconds, num_texts)


def test_survival_is_the_mean_over_the_posterior() -> None:
    """Checked by draws of the rate from its Beta distribution after 3 of 5 right drafts."""
    rates = RateDistribution(0.4, 10.0)
    draws = np.random.default_rng(0).beta(4 + 3, 6 + 2, 400_000)
    expected = [(draws**depth).mean() for depth in (1, 2, 3)]
    assert rates.survival([3], [5], 3)[0] == pytest.approx(expected, rel=0.01)


def test_noise_of_few_rounds_is_no_difference_of_texts() -> None:
    """Texts with one rate have a strength that is as large as can be told; those with two rates
    have the deviation of these rates.
    """
    random = np.random.default_rng(1)
    equal = [(int(random.binomial(20, 0.5)), 20) for _ in range(200)]
    unequal = [(int(random.binomial(20, rate)), 20) for rate in [0.2, 0.8] * 100]
    assert RateDistribution.fit(equal).strength >= 128
    fitted = RateDistribution.fit(unequal)
    assert fitted.mean == pytest.approx(0.5, abs=0.03)
    assert (0.25 / (fitted.strength + 1)) ** 0.5 == pytest.approx(0.3, abs=0.06)


def test_drafts_are_counted_to_the_first_wrong_token() -> None:
    """Four rounds of 1, 2, 3 and 4 tokens with 3 draft tokens each."""
    assert count_drafts([1, 1, 1, 1], DEPTH) == (0 + 1 + 2 + 3, 1 + 2 + 3 + 3)
    assert count_drafts([], DEPTH) == (0, 0)
    request = DraftedRequest(0.0, 9, 10, rights=np.array([0, 1, 1, 0, 1, 1, 1, 1, 1, 1], bool))
    for length, emitted in ((3, 3), (2, 3), (2, 3)):
        assert request.run_round(length) == emitted
        request.remaining -= emitted
    assert (request.accepted, request.judged) == (2 + 2 + 2, 3 + 2 + 2)


def test_lengths_by_request_gain_where_texts_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of which one half accepts nearly all and the other next to nothing gain; texts with one
    rate neither gain nor lose.
    """
    monkeypatch.setattr(load, "LOADS", (0.5, 1.0))
    times = {1: 0.010, 8: 0.012}, {1: 0.0112, 8: 0.028}, {1: [0.4, 0.2, 0.2, 0.2]}
    rows = {"differ": [[30, 1, 0, 0], [0, 1, 2, 28]] * 8, "equal": [[50, 25, 12, 13]] * 16}
    gains = {}
    for name, text_rounds in rows.items():
        table = TimeTable(*times, 0.001, [41], {1: 0.0003, 8: 0.002}, text_rounds)
        result = simulate_request_lengths(table, DEPTH, 50.0, num_requests=120)
        gains[name] = result["gains"]
    assert min(gains["differ"]) > 0.99 and max(gains["differ"]) > 1.04
    assert max(abs(gain - 1) for gain in gains["equal"]) < 0.05
