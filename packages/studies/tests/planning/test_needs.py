"""What a plan says that a training changes and learns from."""

import json
from typing import Any

import pytest

from lab.benchmarks import training_needs

from .test_plan import make_plan

ROWS = json.loads(training_needs.RESULTS.read_text())["rows"]


@pytest.mark.parametrize(
    ("recipe", "kind", "source"),
    [
        ("medusa1", "heads", "the target's distributions"),
        ("eagle3", "layers", "the target's distributions"),
        ("dflash", "layers", "text"),
        ("gkd", "a draft model", "the target's distributions"),
        ("medusa2", "heads and adapters of the target", "the target's distributions"),
        ("uno", "adapters beside the target", "the target's distributions"),
    ],
)
def test_a_plan_says_what_is_trained(recipe: str, kind: str, source: str) -> None:
    """The words of the surveys for one recipe of each kind."""
    plan = make_plan(f"recipe={recipe}", "target=tiny", "plan.tokens=100000", device="cuda")
    training = plan["training"]
    assert (training["trains"], training["learns_from"]) == (kind, source)


def test_every_recipe_has_a_row() -> None:
    """`python -m lab.benchmarks.training_needs` writes the rows of all recipes again."""
    assert {*training_needs.list_recipes()} <= {row["recipe"] for row in ROWS}


@pytest.mark.sweep(1, free=("row",))
@pytest.mark.parametrize("row", ROWS, ids=[row["recipe"] for row in ROWS])
def test_rows_of_training_needs_are_what_the_command_plans(row: dict[str, Any]) -> None:
    """The page has the numbers that the command plans for every recipe that is installed here."""
    if row["recipe"] not in training_needs.list_recipes():
        pytest.skip("the recipe's package is not installed")
    plan = make_plan(f"recipe={row['recipe']}", *training_needs.SHARED, device="cuda")
    numbers = training_needs.select_numbers(plan)
    assert numbers == {key: row[key] for key in numbers}
