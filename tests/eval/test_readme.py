"""The committed comparison and the table of families are complete."""

import re
from typing import Any

import pytest

from lab.pages.render import load_measurements, load_results

MEASUREMENTS = load_measurements()


@pytest.fixture(params=["comparison-smollm2", "comparison-tiny"])
def page(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def comparison(page: str) -> dict[str, Any]:
    result: dict[str, Any] = load_results(MEASUREMENTS[page]["files"][0])
    return result


def test_a_committed_comparison_is_complete(page: str, comparison: dict[str, Any]) -> None:
    """It has every recipe that its command names, the setting of its numbers, and only answers
    that equal the target's.
    """
    named = re.findall(r"recipes=(\S+) ", MEASUREMENTS[page]["command"])[-1].split(",")
    assert [row["name"] for row in comparison["rows"] if row["trained"]] == named
    assert all(
        comparison["setting"][key]
        for key in ("commit", "versions", "hardware", "device", "dtype", "threads", "data")
    )
    for row in comparison["rows"]:
        for entry in row["systems"]:
            assert (
                entry["lossless"]["identical"]
                == entry["lossless"]["checked"]
                == comparison["setting"]["prompts"]
            )


def test_answers_of_the_table_of_families_equal_the_targets() -> None:
    rows = load_results("heads-tiny.json")["rows"]
    assert all(
        row[kind]["identical"] == row[kind]["checked"] for row in rows for kind in ("chain", "tree")
    )
