"""The README's comparisons are the committed ones."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare_heads import table
from spectrain.eval.report import comparison_markdown

ROOT = Path(__file__).parents[2]
TABLES = {"compare": "compare-smollm2.json"}  # by their marks in the README


@pytest.fixture(params=TABLES)
def mark(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def comparison(mark: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "eval" / "results" / TABLES[mark]).read_text())
    return found


def test_the_table_is_the_committed_comparison(mark: str, comparison: dict[str, Any]) -> None:
    """Every number between the marks is made from the JSON."""
    shown = (ROOT / "README.md").read_text().split(f"<!-- {mark} -->\n")[1].split(f"\n<!-- /{mark} -->")[0]
    assert shown == comparison_markdown(comparison)


def test_the_table_of_heads_is_the_committed_one() -> None:
    """Every number between its marks is made from the JSON, whose answers are all the target's."""
    rows = json.loads((ROOT / "eval" / "results" / "heads-tiny.json").read_text())["rows"]
    shown = (ROOT / "docs" / "families.md").read_text().split("<!-- heads -->\n")[1].split("\n<!-- /heads -->")[0]
    assert shown == table(rows)
    assert all(row[kind]["identical"] == row[kind]["checked"] for row in rows for kind in ("chain", "tree"))


def test_a_committed_comparison_is_whole(mark: str, comparison: dict[str, Any]) -> None:
    """It has every recipe that its command names, the setting of its numbers, and every answer the target's."""
    before = (ROOT / "README.md").read_text().split(f"<!-- {mark} -->")[0].split("\n## ")[-1]
    named = re.findall(r"recipes=(\S+) ", before)[-1].split(",")
    assert [row["name"] for row in comparison["rows"] if row["trained"]] == named
    assert all(comparison["setting"][key] for key in ("commit", "versions", "hardware", "device", "dtype", "threads", "data"))
    for row in comparison["rows"]:
        for entry in row["systems"]:
            assert entry["lossless"]["identical"] == entry["lossless"]["checked"] == comparison["setting"]["prompts"]
