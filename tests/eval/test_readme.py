"""The README's comparison is the committed one."""

import json
from pathlib import Path
from typing import Any

import pytest

from spectrain.eval.report import comparison_markdown

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "eval" / "results" / "compare-smollm2.json"


@pytest.fixture(scope="module")
def comparison() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(MEASURED.read_text())
    return found


def test_the_table_is_the_committed_comparison(comparison: dict[str, Any]) -> None:
    """Every number between the marks is made from the JSON."""
    shown = (ROOT / "README.md").read_text().split("<!-- compare -->\n")[1].split("\n<!-- /compare -->")[0]
    assert shown == comparison_markdown(comparison)


def test_the_committed_comparison_is_whole(comparison: dict[str, Any]) -> None:
    """It has every recipe, the setting of its numbers, and its losslessness checked."""
    names = {row["name"] for row in comparison["rows"]}
    assert names >= {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    assert {"commit", "versions", "hardware", "device", "dtype", "threads", "prompts", "data"} <= comparison["setting"].keys()
    for row in comparison["rows"]:
        for entry in row["systems"]:
            assert entry["lossless"]["identical"] == entry["lossless"]["checked"] == comparison["setting"]["prompts"]
