"""The check of distributions against known ones: how often it is wrong, and what it sees."""

from collections.abc import Mapping

import numpy as np
import pytest

from spectrain.eval.distribution import (
    Outcome,
    Stratum,
    compare_strata,
    count_cells,
    estimate_distance,
    merge_rare,
)

CHANCES: dict[Outcome, float] = {
    (0, 0): 0.4,
    (0, 1): 0.2,
    (0, 2): 0.005,
    (1,): 0.3,
    (2, 0): 0.05,
    (2, 1): 0.045,
}


def draw(
    chances: Mapping[Outcome, float], count: int, random: np.random.Generator
) -> list[Outcome]:
    outcomes = [*chances]
    numbers = random.choice(len(outcomes), count, p=[*chances.values()])
    return [outcomes[number] for number in numbers]


def move_mass(distance: float) -> dict[Outcome, float]:
    """Return the distribution with this much mass moved from one outcome to another."""
    return CHANCES | {(0, 0): 0.4 - distance, (1,): 0.3 + distance}


def make_stratum(
    distance: float, count: int, random: np.random.Generator, has_probabilities: bool
) -> Stratum:
    drafted = draw(move_mass(distance), count, random)
    if has_probabilities:
        return Stratum(drafted, CHANCES)
    return Stratum(drafted, None, draw(CHANCES, count, random))


def test_rare_outcomes_share_a_cell_with_those_that_begin_alike() -> None:
    """A rare text joins the rest of its beginning, and what is left joins the smallest cell."""
    weights: dict[Outcome, float] = {
        (0, 0): 400,
        (0, 1): 9,
        (0, 2): 8,
        (1, 0): 5,
        (1, 1): 7,
        (2,): 3,
    }
    cells = merge_rare(weights)
    assert cells[0, 0] == (0, 0)
    assert cells[0, 1] == cells[0, 2] == (0,)
    assert cells[1, 0] == cells[1, 1] == (1,)
    assert cells[2,] == (1,)


@pytest.mark.parametrize("has_probabilities", [True, False])
def test_false_alarms_are_as_rare_as_stated(
    has_probabilities: bool,
) -> None:
    """Of 2,000 comparisons of equal distributions, the share with p below a level is that level;
    the estimated distance is 0 on average, and its interval holds 0 in 95 %.
    """
    random = np.random.default_rng(0)
    strata = [make_stratum(0, 500, random, has_probabilities) for _ in range(2000)]
    values = [
        comparison.p_value
        for stratum in strata
        if (comparison := compare_strata("text", [stratum]))
    ]
    assert len(values) == 2000
    for level in (0.3, 0.05, 0.01):
        error = (level * (1 - level) / 2000) ** 0.5
        assert abs(np.mean(np.array(values) < level) - level) < 4 * error
    estimates = [estimate_distance([stratum]) for stratum in strata[:400]]
    assert abs(np.mean([stratum.value for stratum in estimates])) < 0.005
    assert 0.9 < np.mean([stratum.low <= 0 <= stratum.high for stratum in estimates]) < 0.99


@pytest.mark.parametrize("has_probabilities", [True, False])
def test_the_power_is_as_stated(has_probabilities: bool) -> None:
    """At the distance that is called visible, at least 98 of 100 samples are called different, and
    the estimate of the distance is not above it on average.
    """
    random = np.random.default_rng(1)
    level = 1e-4
    comparison = compare_strata("text", [make_stratum(0, 1000, random, has_probabilities)])
    assert comparison is not None
    distance = comparison.visible_distance(level)
    assert 0 < distance < 0.4
    strata = [make_stratum(distance, 1000, random, has_probabilities) for _ in range(200)]
    is_rejected = [
        other.p_value < level for stratum in strata if (other := compare_strata("text", [stratum]))
    ]
    assert np.mean(is_rejected) >= 0.98
    estimates = [estimate_distance([stratum]).value for stratum in strata]
    assert np.mean(estimates) == pytest.approx(distance, abs=0.01)


def test_strata_add_up() -> None:
    """Two strata have the statistic and the freedom of both, and see what one of twice the size
    does with that freedom.
    """
    random = np.random.default_rng(2)
    strata = [make_stratum(0.1, 600, random, True) for _ in range(2)]
    both = compare_strata("text", strata)
    cells = [count_cells(stratum) for stratum in strata]
    assert both is not None
    assert both.freedom == sum(stratum.freedom for stratum in cells)
    assert both.texts == both.effective_size == 1200


def test_a_single_outcome_tells_nothing() -> None:
    """A target that leaves nothing to chance cannot be compared."""
    assert compare_strata("text", [Stratum([(0,)] * 50, {(0,): 1.0})]) is None
    assert compare_strata("text", [Stratum([(0,)] * 50, None, [])]) is None
