"""Times that a reader sees are those of the rounds; prices and categories follow from the same
numbers.
"""

import pytest

from spectrain.decoding.generation import ROUND_PARTS, Generation
from spectrain.eval import metrics
from spectrain.eval.metrics import Rates, price_tokens
from spectrain.eval.notes import describe_worst_category
from spectrain.eval.user_times import describe_user_times, measure_user_times, token_gaps

from .test_metrics import TURNS, make_generation, make_turn


def make_timed_generation(
    lengths: list[int], seconds: list[float], output: int, prefill: float = 0.1
) -> Generation:
    """A generation of `output` tokens whose rounds emitted `lengths` tokens in `seconds`."""
    rounds = [
        {"draft": value / 4, "verify": value / 2, "accept": 0.0, "other": value / 4}
        for value in seconds
    ]
    total = {part: sum(times[part] for times in rounds) for part in ROUND_PARTS}
    return Generation(
        [1],
        list(range(output)),
        lengths,
        round_seconds=rounds,
        seconds={"prefill": prefill, **total},
    )


def test_gaps_are_rounds_and_zeros() -> None:
    """The gaps of an answer sum to its decoding; a round's first token waits for it, and trimmed
    tokens do not count.
    """
    drafted = make_timed_generation([3, 1, 4], [0.06, 0.02, 0.08], 7)
    assert token_gaps(drafted) == pytest.approx([0.06, 0, 0, 0.02, 0.08, 0])
    assert (
        sum(token_gaps(drafted))
        == pytest.approx(drafted.finish_seconds)
        == pytest.approx(drafted.decode_seconds)
    )
    plain = make_timed_generation([1] * 6, [0.02] * 6, 7)
    assert token_gaps(plain) == pytest.approx([0.02] * 6)


def test_user_times_of_two_answers() -> None:
    """Half of the answers keep the bound of 50 ms in 95 % of their tokens, so goodput is their
    tokens over all seconds.
    """
    slow = make_timed_generation([3, 3], [0.06, 0.06], 7, prefill=0.3)
    quick = make_timed_generation([1] * 6, [0.02] * 6, 7)
    times = measure_user_times([slow, quick], 50)
    assert times.within_bound == round(10 / 12, 4)
    assert times.goodput == pytest.approx(6 / 0.24)
    assert times.first_token_ms is not None and times.first_token_ms.p50 == pytest.approx(200)
    assert times.between_tokens_ms is not None and times.between_tokens_ms.p50 == pytest.approx(20)
    assert measure_user_times([], 50) == type(times)(None, None, None, None)
    entry = {
        name: vars(times)
        | {key: vars(getattr(times, key)) for key in ("first_token_ms", "between_tokens_ms")}
        for name in ("plain", "drafted")
    }
    assert "within 50 ms: 83.3 % and 83.3 %" in describe_user_times(
        {"user_times": {"bound_ms": 50.0, **entry}}
    ).replace("%", " %")


def test_prices_follow_from_rates() -> None:
    """3.6 an hour is a thousandth a second: 100 and 200 tokens a second cost 10 and 5 a million."""
    assert price_tokens(Rates(100.0, 200.0), 3.6) == {
        "autoregressive": pytest.approx(10),
        "drafted": pytest.approx(5),
    }
    assert price_tokens(Rates(0.0, 200.0), None) is None


def test_categories_have_intervals_and_the_worst_is_named() -> None:
    turns = [
        *TURNS[:2],
        make_turn("d", make_generation([1, 1], [2, 2], 3), "chat"),
        make_turn("e", make_generation([2, 1], [2, 2], 4), "chat"),
    ]
    numbers = metrics.measure_system(turns, True)["by_category"]
    assert numbers["chat"].prompts == 2 and numbers["chat"].speedup == round(
        metrics.speedup(turns[2:]), 4
    )
    assert numbers["chat"].speedup_ci95 == metrics.speedup_interval(turns[2:])
    entry = {"by_category": {name: vars(entry) for name, entry in numbers.items()}}
    (sentence,) = describe_worst_category(entry)
    assert not [*describe_worst_category({**entry, "speedup": {"quotable": False}})]
    assert sentence.startswith("Worst category: chat, ") and "on 2 prompts; best: all, " in sentence
    assert not [*describe_worst_category({"by_category": {"all": vars(numbers["all"])}})]
