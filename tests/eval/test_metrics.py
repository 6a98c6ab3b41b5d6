"""Metrics of hand-made generations have the answers that pencil and paper give."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from spectrain.decoding.generation import Generation
from spectrain.eval import metrics
from spectrain.eval.metrics import SystemNumbers, Turn
from spectrain.eval.notes import explain_numbers

SECONDS = {"prefill": 100.0, "draft": 1.0, "verify": 2.0, "accept": 0.5, "other": 0.5}


def make_generation(
    accepted: list[int],
    depths: list[int],
    output: int,
    cut: bool = False,
    scale: float = 1.0,
    batch: int = 1,
) -> Generation:
    """A generation of `output` tokens whose batch's decoding took 4 * scale seconds."""
    seconds = {part: value * scale for part, value in SECONDS.items()}
    return Generation(
        [1],
        list(range(output)),
        round_lengths=accepted,
        depths=depths,
        is_cut=cut,
        is_done=True,
        seconds=seconds,
        batch_size=batch,
    )


def make_turn(
    name: str, drafted: Generation, category: str = "all", steps: int = 8, scale: float = 4.0
) -> Turn:
    """Pair a drafted generation with an autoregressive one of `steps` steps."""
    return Turn(
        name,
        0,
        category,
        make_generation([1] * steps, [0] * steps, steps + 1, scale=scale),
        drafted,
    )


TURNS = [
    make_turn("a", make_generation([3, 1, 4], [3, 3, 3], 9)),
    make_turn(
        "b", make_generation([2, 2, 4], [3, 1, 3], 6, cut=True, scale=0.5)
    ),  # 1 + 2 + 2 tokens, then one of the last four
    make_turn("c", make_generation([4], [3], 3, cut=True)),  # no complete round at all
]


def test_complete_rounds_leave_out_a_cut_round() -> None:
    """A last round that EOS or the limit cut short is left out, any other is not."""
    assert [turn.drafted.complete_round_lengths for turn in TURNS] == [[3, 1, 4], [2, 2], []]


def test_pooled_acceptance() -> None:
    """The pooled acceptance length is tokens over rounds, all prompts together, cut rounds left
    out.
    """
    assert metrics.pooled_acceptance(TURNS) == pytest.approx((3 + 1 + 4 + 2 + 2) / 5)


def test_per_prompt_acceptance() -> None:
    """The mean of each prompt's mean counts; a prompt without a complete round has none."""
    assert metrics.per_prompt_acceptance(TURNS) == pytest.approx(
        ((3 + 1 + 4) / 3 + (2 + 2) / 2) / 2
    )


@pytest.mark.parametrize("statistic", [metrics.pooled_acceptance, metrics.per_prompt_acceptance])
def test_no_complete_round_counts_as_a_token(statistic: Callable[[Sequence[Turn]], float]) -> None:
    """Without a complete round the acceptance length is that of autoregressive decoding."""
    assert statistic(TURNS[2:]) == 1.0


def test_acceptance_by_depth() -> None:
    """Depth k counts rounds that accepted k - 1 drafted tokens and had a k-th; bonus tokens and
    cut rounds do not count.
    """
    # accepted 2, 0 and 3 of 3, then 1 of 3 and 1 of 1
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
    """Acceptance length times the autoregressive step over the drafted round's draft, verify and
    accept times.
    """
    slow = [
        replace(turn, drafted=replace(turn.drafted, seconds=four_times(turn.drafted.seconds)))
        for turn in TURNS
    ]
    step = 48 / 24
    cycle = 4 * 3.5 * (1 + 0.5 + 1) / 7
    assert metrics.predicted_speedup(slow) == pytest.approx(12 / 5 * step / cycle)


def four_times(seconds: dict[str, float]) -> dict[str, float]:
    return {part: 4 * value for part, value in seconds.items()}


def test_a_round_counts_as_a_step_at_least() -> None:
    """Its forward does what a step does; here the plain steps took 1.6 times as long by chance."""
    assert 48 / 24 > 3.5 * (1 + 0.5 + 1) / 7
    assert metrics.predicted_speedup(TURNS) == metrics.pooled_acceptance(TURNS)


def test_time_share() -> None:
    """Shares are those of the drafted seconds without the prefill."""
    assert metrics.time_share(TURNS) == {
        "draft": 0.25,
        "verify": 0.5,
        "accept": 0.125,
        "other": 0.125,
    }


def test_per_prompt_acceptance_joins_turns_of_a_prompt() -> None:
    """Turns of one prompt are one entry of the mean."""
    turns = [
        make_turn("a", make_generation([3, 3, 3], [3] * 3, 10)),
        make_turn("a", make_generation([1], [3], 2)),
    ]
    turns.append(make_turn("b", make_generation([2], [3], 3)))
    assert metrics.per_prompt_acceptance(turns) == pytest.approx((10 / 4 + 2) / 2)


def test_histogram() -> None:
    """Entry k counts complete rounds of k + 1 tokens; it gives the pooled acceptance length
    back.
    """
    assert metrics.count_round_lengths(TURNS) == [1, 2, 1, 1]
    assert metrics.count_round_lengths(TURNS[2:]) == []
    counts = metrics.count_round_lengths(TURNS)
    assert sum((k + 1) * n for k, n in enumerate(counts)) / sum(counts) == pytest.approx(
        metrics.pooled_acceptance(TURNS)
    )


def test_tau_by_convention() -> None:
    """Every round counts, cut ones too: 20 tokens in 7 rounds, 13 of 19 drafted tokens accepted."""
    every = {
        "spec_bench": 20 / 7,
        "eagle": 20 / 7,
        "medusa": 20 / 7,
        "hass": (8 / 3 + 8 / 3 + 4) / 3,
        "gpt_fast": 13 / 7,
    }
    tau = metrics.tau_by_convention(TURNS, chain=True)
    assert tau == pytest.approx({**every, "layerskip": 13 / 19}, abs=1e-4)
    assert metrics.tau_by_convention(TURNS, chain=False) == {**tau, "layerskip": None}


def test_tau_by_convention_is_ours_where_no_round_is_cut() -> None:
    """The docstring's claim on which definitions coincide with ours."""
    tau = metrics.tau_by_convention(TURNS[:1], chain=True)
    assert tau["spec_bench"] == pytest.approx(metrics.pooled_acceptance(TURNS[:1]), abs=1e-4)
    assert tau["hass"] == pytest.approx(metrics.per_prompt_acceptance(TURNS[:1]), abs=1e-4)


@pytest.mark.parametrize("turns", [[], [make_turn("prefill only", make_generation([], [], 1))]])
def test_tau_by_convention_without_rounds(turns: list[Turn]) -> None:
    """Without a round a convention gives what autoregressive decoding gives."""
    ones = {"spec_bench": 1.0, "eagle": 1.0, "medusa": 1.0, "hass": 1.0}
    assert metrics.tau_by_convention(turns, chain=True) == {
        **ones,
        "gpt_fast": 0.0,
        "layerskip": None,
    }


BATCH = [  # two rows decoded together, the second done after the first of two rounds, and one alone
    make_generation([2, 3], [3, 3], 6, batch=2, scale=2),
    make_generation([4], [3], 5, batch=2, scale=2),
    make_generation([1], [3], 2),
]
for row, rounds in zip(BATCH, (2, 1, 1)):
    row.round_seconds = [{"draft": 1.0, "verify": 2.0, "accept": 0.5, "other": 0.5}] * rounds


def test_rows_of_a_batch_share_its_seconds() -> None:
    """10 tokens in one batch of 8 seconds and one of 4; a batch counts once."""
    assert metrics.tokens_per_second(BATCH) == pytest.approx(10 / 12)


def test_per_user_tokens_per_second() -> None:
    """Each row's tokens are divided by the time until it was done; a row without a round has no
    speed.
    """
    expected = (5 / 8 + 4 / 4 + 1 / 4) / 3
    assert metrics.per_user_tokens_per_second(BATCH) == pytest.approx(expected)
    assert metrics.per_user_tokens_per_second(
        [*BATCH, make_generation([], [], 1, scale=0)]
    ) == pytest.approx(expected)
    assert metrics.per_user_tokens_per_second([]) == 0.0


def test_speedup_and_its_parts_use_the_shares() -> None:
    """Two rows of a batch count as one row of half the seconds."""
    alone = [make_turn(f"p{i}", make_generation([2, 3], [3, 3], 6, scale=1.0)) for i in range(2)]
    together = [
        make_turn(f"p{i}", make_generation([2, 3], [3, 3], 6, scale=2.0, batch=2)) for i in range(2)
    ]
    mixed = [together[0], make_turn("c", make_generation([1], [3], 2, scale=3.0))]
    mixed[1].drafted.seconds["draft"] += 4.0
    for statistic in (
        metrics.speedup,
        metrics.predicted_speedup,
        metrics.time_share,
        metrics.speedup_interval,
    ):
        assert statistic(together) == statistic(alone)
    assert metrics.time_share(mixed)["draft"] == pytest.approx((1 + 7) / (4 + 16))


def test_rows_of_a_batch_have_no_interval_of_speed() -> None:
    """Rows of a batch share its seconds, so they are no independent draws: the drafter's and every
    category's interval is missing, which a sentence says; that of tokens per forward stays."""
    together = [
        make_turn(f"p{i}", make_generation([2, 3 + i], [4, 4], 6 + i, scale=2.0, batch=2))
        for i in range(4)
    ]
    numbers = metrics.measure_system(together, True, shares_times=True)
    assert numbers["speedup"].ci95 is numbers["by_category"]["all"].speedup_ci95 is None
    assert numbers["speedup"].ratio == round(metrics.speedup(together), 4)
    assert (
        numbers["acceptance_length"].ci95
        == numbers["by_category"]["all"].ci95
        == metrics.acceptance_interval(together)
    )
    summary = SystemNumbers(**numbers).to_json()
    summary["setting"] = {"batch_size": 2, "device": "cpu", "dtype": "float32"}
    assert "Speedups have no interval, because the prompts of a batch share its time." in " ".join(
        explain_numbers(summary)
    )
    assert metrics.measure_system(together, True)["speedup"].ci95 is not None


INTERVALS = [
    (metrics.pooled_acceptance, metrics.acceptance_interval),
    (metrics.speedup, metrics.speedup_interval),
]
Statistic = Callable[[Sequence[Turn]], float]
IntervalOf = Callable[[Sequence[Turn]], metrics.Interval]


def make_varied_turns(prompts: int) -> list[Turn]:
    """Prompts that differ in acceptance and seconds."""
    return [
        make_turn(
            f"p{i}",
            make_generation([1 + i % 4, 2], [3, 3], 4 + i % 4, scale=1 + i % 3),
            scale=4 + i % 5 / 4,
        )
        for i in range(prompts)
    ]


@pytest.mark.parametrize(("statistic", "interval"), INTERVALS)
@pytest.mark.parametrize("prompts", [3, 7, 8, 12, 40])
def test_interval_contains_the_value_and_repeats(
    statistic: Statistic, interval: IntervalOf, prompts: int
) -> None:
    """The interval lies around the value, is the same each time and does not depend on the order
    of turns.
    """
    turns = make_varied_turns(prompts)
    ends = interval(turns)
    assert ends is not None and ends[0] < statistic(turns) < ends[1]
    assert interval(turns) == ends == interval(turns[::-1])


@pytest.mark.parametrize(("statistic", "interval"), INTERVALS)
def test_interval_is_the_point_where_prompts_are_equal(
    statistic: Statistic, interval: IntervalOf
) -> None:
    """Without a difference between prompts there is nothing to be uncertain about."""
    turns = [
        make_turn(f"p{i}", make_generation([2, 3, 1], [3] * 3, 7, scale=0.7)) for i in range(10)
    ]
    assert interval(turns) == [round(statistic(turns), 4)] * 2


@pytest.mark.parametrize(("prompts", "has_interval"), [(2, False), (7, False), (8, True)])
def test_few_equal_prompts_have_no_interval(prompts: int, has_interval: bool) -> None:
    """Counts of two prompts are often the same by chance, which makes nothing certain."""
    turns = [make_turn(f"p{i}", make_generation([2, 1], [3] * 2, 4)) for i in range(prompts)]
    ends = metrics.acceptance_interval(turns)
    assert ends == ([1.5, 1.5] if has_interval else None)
    other = make_turn("other", make_generation([2, 2], [3] * 2, 5))
    assert metrics.acceptance_interval([*turns, other]) is not None


@pytest.mark.parametrize("interval", [metrics.acceptance_interval, metrics.speedup_interval])
def test_interval_needs_two_prompts(interval: IntervalOf) -> None:
    """Turns of one prompt are one draw, and a prompt without a round is none."""
    same = [make_turn("same", make_generation([count], [3], 1 + count)) for count in (1, 2, 3, 4)]
    roundless = Turn(
        "none", 0, "all", make_generation([], [], 1, scale=0), make_generation([], [], 1, scale=0)
    )
    for turns in ([], same, [*same, roundless]):
        assert interval(turns) is None
    assert interval([*same, make_turn("other", make_generation([2], [3], 3))]) is not None


def test_interval_joins_turns_of_a_prompt() -> None:
    """Two turns of a prompt count as one prompt with the rounds of both."""
    parts = [((1, 2), (3,)), ((4, 4), (2, 2)), ((2,), (1, 3)), ((3, 3), (4,))]
    split = [
        make_turn(f"p{i}", make_generation(list(rounds), [3], 9))
        for i, pair in enumerate(parts)
        for rounds in pair
    ]
    joined = [
        make_turn(f"p{i}", make_generation([*first, *second], [3], 9))
        for i, (first, second) in enumerate(parts)
    ]
    assert metrics.acceptance_interval(split) == metrics.acceptance_interval(joined)


def test_few_prompts_take_students_t() -> None:
    """By hand: 3 prompts of 2 rounds with 2, 4 and 6 tokens; influences -1/2, 0, 1/2; t of 2
    degrees is 4.3027. A forward emits a token at least, whatever t says."""
    turns = [
        make_turn(f"p{i}", make_generation([count, count], [3, 3], 9))
        for i, count in enumerate((1, 2, 3))
    ]
    error = 4.3027 * np.sqrt(0.5 / 6)
    ends = [2 * np.exp(-error), 2 * np.exp(error)]
    assert metrics.interval(metrics.acceptance_columns(turns), (1, -1)) == pytest.approx(
        ends, abs=1e-3
    )
    assert metrics.acceptance_interval(turns) == pytest.approx([1.0, ends[1]], abs=1e-3)


def test_student_takes_over_where_resamples_have_no_spread() -> None:
    """One prompt in 20 differs: a third of the resamples lack it and have no error to divide by."""
    turns = [
        make_turn(f"p{i:02}", make_generation([4 if i == 0 else 2], [3], 9)) for i in range(20)
    ]
    center = np.log(2.1)
    error = 2.093 * np.sqrt(((4 / 2.1 - 1) ** 2 + 19 * (2 / 2.1 - 1) ** 2) / (20 * 19))
    assert metrics.acceptance_interval(turns) == pytest.approx(
        list(np.exp([center - error, center + error])), abs=1e-3
    )


# drafted tokens a round; seconds of a round over those of an autoregressive step
DEPTH = 4
CYCLE = 1.5


def expected_tokens(level: np.ndarray) -> np.ndarray:
    """Return the expected tokens of a round whose drafted tokens are each accepted with
    probability `level`.
    """
    return sum(level**k for k in range(DEPTH + 1))


def draw_turns(prompts: int) -> list[Turn]:
    """Prompts of the population below: a level of acceptance each, more rounds where it is low,
    noisy seconds.
    """
    random = np.random.default_rng(7)
    levels = random.beta(4, 3, prompts)
    counts = 4 + random.poisson(random.gamma(3, 8 * (1 - levels)))
    speeds = random.lognormal(-0.02, 0.2, (prompts, 2))  # of mean 1
    turns = []
    for level, count, (slow, slower) in zip(levels, counts, speeds):
        accepted = np.minimum(random.geometric(1 - level, count), DEPTH + 1).tolist()
        tokens = sum(accepted)
        drafted = Generation(
            [1], [0] * (tokens + 1), accepted, seconds={"verify": CYCLE * count * slow}
        )
        turns.append(
            Turn(
                "",
                0,
                "all",
                Generation([1], [0] * (tokens + 1), seconds={"verify": tokens * slower}),
                drafted,
            )
        )
    return turns


@pytest.mark.slow
def test_intervals_cover() -> None:
    """Of 1,000 evaluations of 40 prompts, 93 to 97 % have the true value in their 95 % interval."""
    levels = np.random.default_rng(0).beta(4, 3, 2_000_000)
    rounds = 4 + 24 * (1 - levels)  # expected, given the level
    length = np.mean(rounds * expected_tokens(levels)) / np.mean(rounds)
    truth = {metrics.acceptance_interval: length, metrics.speedup_interval: length / CYCLE}
    hits = dict.fromkeys(truth, 0)
    population = draw_turns(40_000)
    for first in range(0, len(population), 40):
        turns = [
            replace(turn, id=f"p{i:02}") for i, turn in enumerate(population[first : first + 40])
        ]
        for interval, value in truth.items():
            ends = interval(turns)
            assert ends is not None
            hits[interval] += ends[0] <= value <= ends[1]
    assert all(930 <= count <= 970 for count in hits.values()), hits
