"""Metrics of hand-made generations have the answers that pencil and paper give."""

from collections.abc import Callable, Sequence

import pytest

from spectrain.decode import Generation
from spectrain.eval import metrics
from spectrain.eval.metrics import Turn

SECONDS = {"prefill": 100.0, "draft": 1.0, "verify": 2.0, "accept": 0.5, "other": 0.5}


def generation(accepted: list[int], nodes: list[int], output: int, cut: bool = False, scale: float = 1.0) -> Generation:
    """A generation of `output` tokens whose decoding took 4 * scale seconds."""
    seconds = {part: value * scale for part, value in SECONDS.items()}
    return Generation([1], list(range(output)), accepted, nodes, cut, True, seconds)


def turn(name: str, drafted: Generation, category: str = "all", steps: int = 8, scale: float = 4.0) -> Turn:
    """A drafted generation beside an autoregressive one of `steps` steps."""
    return Turn(name, 0, category, generation([1] * steps, [0] * steps, steps + 1, scale=scale), drafted)


TURNS = [
    turn("a", generation([3, 1, 4], [3, 3, 3], 9)),
    turn("b", generation([2, 2, 4], [3, 1, 3], 6, cut=True, scale=0.5)),  # 1 + 2 + 2 tokens, then one of the last four
    turn("c", generation([4], [3], 3, cut=True)),  # no whole round at all
]


def test_whole_rounds_leave_out_a_cut_one() -> None:
    """A last round that EOS or the limit cut short is left out, any other is not."""
    assert [turn.drafted.whole_rounds for turn in TURNS] == [[3, 1, 4], [2, 2], []]


def test_pooled_acceptance() -> None:
    """Tokens over rounds, all prompts together, cut rounds left out."""
    assert metrics.pooled_acceptance(TURNS) == pytest.approx((3 + 1 + 4 + 2 + 2) / 5)


def test_per_prompt_acceptance() -> None:
    """The mean of each prompt's mean; a prompt without a whole round has none."""
    assert metrics.per_prompt_acceptance(TURNS) == pytest.approx(((3 + 1 + 4) / 3 + (2 + 2) / 2) / 2)


@pytest.mark.parametrize("statistic", [metrics.pooled_acceptance, metrics.per_prompt_acceptance])
def test_no_whole_round_counts_as_one_token(statistic: Callable[[Sequence[Turn]], float]) -> None:
    """Without a whole round the acceptance length is that of autoregressive decoding."""
    assert statistic(TURNS[2:]) == 1.0


def test_acceptance_by_depth() -> None:
    """Depth k counts rounds that kept k - 1 drafted tokens and had a k-th; bonus tokens and cut rounds do not count."""
    # kept 2, 0 and 3 of 3, then 1 of 3 and 1 of 1
    assert metrics.acceptance_by_depth(TURNS) == [round(4 / 5, 4), round(2 / 3, 4), round(1 / 2, 4)]
    assert metrics.acceptance_by_depth(TURNS[2:]) == []


def test_tokens_per_second_leaves_the_prefill_out() -> None:
    """Neither the prefill's token nor its seconds count; trimmed tokens don't either."""
    drafted = [turn.drafted for turn in TURNS]
    assert metrics.tokens_per_second(drafted[:1]) == pytest.approx(8 / 4)
    assert metrics.tokens_per_second(drafted) == pytest.approx((8 + 5 + 2) / (4 + 2 + 4))
    assert metrics.tokens_per_second([]) == 0.0


def test_speedup() -> None:
    """Drafted over autoregressive tokens/s: 15 tokens in 10 s against 24 in 48 s."""
    assert metrics.speedup(TURNS) == pytest.approx((15 / 10) / (24 / 48))


def test_predicted_speedup() -> None:
    """Acceptance length times the autoregressive step over the drafted round's draft, verify and accept times."""
    step, cycle = 48 / 24, 3.5 * (1 + 0.5 + 1) / 7
    assert metrics.predicted_speedup(TURNS) == pytest.approx(12 / 5 * step / cycle)


def test_time_share() -> None:
    """Shares are those of the drafted seconds without the prefill."""
    assert metrics.time_share(TURNS) == {"draft": 0.25, "verify": 0.5, "accept": 0.125, "other": 0.125}


@pytest.mark.parametrize("statistic", [metrics.pooled_acceptance, metrics.speedup])
def test_bootstrap_contains_the_value_and_repeats(statistic: Callable[[Sequence[Turn]], float]) -> None:
    """The interval lies around the value, is the same each time and does not depend on the order of turns."""
    turns = [turn(f"p{i}", generation([1 + i % 4, 2], [3, 3], 4 + i % 4, scale=1 + i % 3)) for i in range(12)]
    low, high = metrics.bootstrap(turns, statistic, draws=200)
    assert low < statistic(turns) < high
    assert metrics.bootstrap(turns, statistic, draws=200) == [low, high]
    assert metrics.bootstrap(turns[::-1], statistic, draws=200) == [low, high]


def test_bootstrap_resamples_prompts_not_turns() -> None:
    """Turns of one prompt are drawn together: a single prompt has an interval of no width."""
    turns = [turn("same", generation([count], [3], 1 + count)) for count in (1, 2, 3, 4)]
    assert metrics.bootstrap(turns, metrics.pooled_acceptance, draws=50) == [2.5, 2.5]
