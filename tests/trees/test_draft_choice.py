"""Rounds draft where that pays, and what trying costs is bounded."""

from random import Random

import pytest

from spectrain.trees.draft_choice import FIRST_COMPARISONS, TRIAL_ALLOWANCE, DraftChoice
from spectrain.trees.estimates import TimeRatios

STEP = 0.02  # seconds of a plain step


def decode_tokens(
    choice: DraftChoice, rate: float, cost: float, num_tokens: int, seed: int = 0
) -> tuple[list[bool], float, int]:
    """Decode tokens with drafts that are accepted at a rate; return which rounds drafted, the
    steps spent and the tokens.
    """
    drafted = []
    emitted = 0
    spent = 0.0
    draw = Random(seed)
    ratios = TimeRatios()
    while emitted < num_tokens:
        drafted.append(choice.should_draft(0.0, ratios.has_drafted))
        noise = draw.lognormvariate(0, 0.1)
        tokens = 1
        while drafted[-1] and tokens < 6 and draw.random() < rate:
            tokens += 1
        comparison = ratios.compare(drafted[-1], noise)
        if drafted[-1]:
            choice.record_draft(tokens, cost, comparison)
        else:
            choice.record_plain(comparison)
        emitted = emitted + tokens
        spent = spent + (cost if drafted[-1] else 1.0) * noise
    return drafted, spent, emitted


@pytest.mark.parametrize(
    "rate, cost", [(0.0, 1.1), (0.0, 1.5), (0.0, 4.0), (0.25, 1.6), (0.35, 1.6)]
)
def test_drafting_that_loses_costs_little(rate: float, cost: float) -> None:
    """Over 2,000 tokens a drafter that does not pay costs 2.5 % at most, and is tried until the
    end.
    """
    for seed in range(5):
        drafted, spent, emitted = decode_tokens(DraftChoice(1.5, 1.0), rate, cost, 2000, seed)
        assert spent <= 1.025 * emitted and any(drafted[-1500:])


@pytest.mark.parametrize("rate, cost", [(0.6, 1.5), (0.7, 2.0), (0.9, 4.0)])
def test_drafting_that_pays_goes_on(rate: float, cost: float) -> None:
    """Nearly all rounds draft, and some are plain steps that measure one."""
    drafted, spent, emitted = decode_tokens(DraftChoice(1.5, 1.0), rate, cost, 3000)
    assert 0.8 * len(drafted) < drafted.count(True) < len(drafted) and spent < emitted


def test_drafting_returns_when_acceptance_rises() -> None:
    """After a stretch that does not pay, one that does is drafted again."""
    choice = DraftChoice(1.5, 1.0)
    before, *_ = decode_tokens(choice, 0.1, 1.5, 1000)
    after, *_ = decode_tokens(choice, 0.7, 1.5, 3000)
    assert before[-500:].count(True) < 50 < 400 < after[-500:].count(True)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_times_that_the_model_misses_decide(factor: float) -> None:
    """Drafted rounds of two tokens that take 1.5 modelled steps pay where they take half of
    that, and not where twice.
    """
    choice = DraftChoice(2.0, 1.5)
    ratios = TimeRatios()
    for _ in range(600):
        if choice.should_draft(0.0, ratios.has_drafted):
            choice.record_draft(2.0, 1.5, ratios.compare(True, factor))
        else:
            choice.record_plain(ratios.compare(False, 1.0))
    assert choice.relative_cost == factor and choice.prefers_draft == (factor < 1)
    assert choice.mean_gain == pytest.approx(2 - 1.5 * factor, abs=0.1)


def test_reading_skipped_tokens_defers_a_trial() -> None:
    """A trial is due when the savings cover its loss and the reading before it; the reading is
    paid from the savings.
    """
    choice = DraftChoice(1.0, 1.1)
    rounds = 0
    while not choice.should_draft(reading_cost=0.3):
        choice.record_plain()
        rounds += 1
    assert rounds == pytest.approx(0.4 / TRIAL_ALLOWANCE, abs=1)
    choice.record_draft(1.0, 1.1, reading_cost=0.3)
    assert choice.savings == pytest.approx(0.0, abs=0.009) and not choice.should_draft()


def test_a_preparing_round_is_followed_by_a_draft() -> None:
    choice = DraftChoice(1.0, 2.0)
    choice.is_preparing = True
    assert choice.should_draft() and not DraftChoice(1.0, 2.0).should_draft()


def test_each_decision_has_its_reason() -> None:
    """A drafter that pays is compared with plain steps at first and where savings allow it; one
    that does not is tried where they do.
    """
    pays = DraftChoice(3.0, 1.0)
    assert pays.decide(is_comparable=False) == "pays"
    pays.was_drafted = True
    assert pays.decide() == "comparison"
    pays.num_compared = FIRST_COMPARISONS
    assert pays.decide() == "pays"
    pays.savings = 2.0
    assert pays.decide() == "comparison"
    loses = DraftChoice(1.0, 2.0)
    assert loses.decide() == "does not pay"
    loses.savings = 1.0
    assert loses.decide() == "trial" and loses.decide(reading_cost=0.1) == "does not pay"
    loses.is_preparing = True
    assert loses.decide(reading_cost=0.1) == "prepared"


def test_a_round_is_compared_with_the_last_ones_of_the_other_kind() -> None:
    """The ratio is that of drafted over plain rounds, whichever of them the new round is."""
    ratios = TimeRatios()
    assert ratios.compare(False, 2.0) is None and not ratios.has_drafted
    assert ratios.compare(False, 4.0) is None and ratios.compare(True, None) is None
    assert ratios.compare(True, 6.0) == 2.0 and ratios.has_drafted
    assert ratios.compare(False, 3.0) == 2.0
    ratios.record_copies(True, 3.0)
    assert (
        ratios.estimate_copy_round(True, 10.0) == 20.0
        and ratios.estimate_copy_round(False, 10.0) == 10.0
    )
