"""What trainings add to their starts: the interval over conversations and seeds, and the rows."""

from typing import Any

import numpy as np
import pytest
from scipy import stats

from lab.benchmarks.recipe_gains import gain_interval, list_recipes, summarize_trainings
from lab.pages.computed_tables import named_rates_table, rule_table
from spectrain.training.validation import interval_around

INFLUENCES = [0.03, -0.01, -0.02, 0.004, -0.004]


def make_training(seed: int, end: float, recipe: str = "gkd", rate: str = "recipe") -> Any:
    numbers = {"start": 1.25, "end": end, "sampled_at_start": 1.4, "sampled_at_end": 1.5}
    losses = {"loss_at_start": 3.0, "loss_at_end": 2.0 - 0.1 * seed, "lr": 1e-3}
    return {
        **{"recipe": recipe, "rate": rate, "target": "tiny", "steps": 40, "seed": seed},
        **numbers,
        **losses,
        **{"tokens": 15000, "places": 2931, "influences": INFLUENCES},
    }


def test_the_interval_of_one_seed_is_that_of_its_conversations() -> None:
    """It is the one that a training prints."""
    assert gain_interval([0.2], [INFLUENCES]) == pytest.approx(
        interval_around(0.2, INFLUENCES), abs=1e-4
    )


def test_seeds_widen_the_interval_by_their_spread() -> None:
    """Without a difference between conversations it is Student's over seeds, and equal seeds add
    nothing to what conversations differ by.
    """
    gains = [0.1, 0.16, 0.13]
    alike = gain_interval(gains, [[0.0] * 5] * 3)
    error = stats.sem(gains)
    assert alike == pytest.approx(stats.t.interval(0.95, 2, np.mean(gains), error))
    assert gain_interval([0.2] * 3, [INFLUENCES] * 3) == pytest.approx(
        gain_interval([0.2], [INFLUENCES])
    )


def test_rows_are_means_over_seeds() -> None:
    """A refused training and one without drafts are in no row; the core's recipes come first."""
    refused = {"recipe": "gkd", "rate": "recipe", "seed": 3, "error": "no memory"}
    draftless = {**make_training(0, 1.0, "judge"), "places": 0}
    trainings = [make_training(0, 1.5), refused, make_training(1, 1.3, "eagle3"), draftless]
    rows = summarize_trainings([*trainings, make_training(1, 1.4)])
    assert [row["recipe"] for row in rows] == ["eagle3", "gkd"]
    assert rows[1]["seeds"] == 2 and rows[1]["end"] == 1.45 and rows[1]["loss_at_end"] == 1.95
    assert rows[1]["gain"] == 16.0 and rows[1]["gains"] == [20.0, 12.0]
    assert rows[1]["gain_interval"][0] < 16.0 < rows[1]["gain_interval"][1]
    assert {"gkd", "eagle3"} < set(list_recipes())


def test_the_rule_is_compared_with_its_best_multiple() -> None:
    """A recipe that was trained at one multiple only is not in the table."""
    trainings = [
        make_training(0, 1.4, rate="auto*0.5"),
        make_training(0, 1.45, rate="auto"),
        make_training(0, 1.5, rate="auto*2"),
        make_training(0, 1.5, "eagle3", "auto"),
    ]
    last = rule_table({"rows": summarize_trainings(trainings)}).splitlines()[-1]
    assert last == "| `gkd` | 1.400 | 1.450 | 1.500 | -3.3% |"


def test_the_rule_is_compared_with_rates_that_were_named() -> None:
    """Over the seeds that have both."""
    trainings = [
        make_training(0, 1.4, rate="4e-3"),
        make_training(1, 1.6, rate="4e-3"),
        make_training(0, 1.47),
        make_training(2, 1.2),
    ]
    last = named_rates_table({"trainings": trainings}).splitlines()[-1]
    assert last == "| `gkd` | 40 | 1 | 4e-3 | 1.400 | 1.470 | +5.0% |"
