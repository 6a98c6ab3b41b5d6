"""The comparison of ways to share training: its page shows what was committed."""

import json
from pathlib import Path

from benchmarks.scale import SHARING_MODES, markdown_table

ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_committed_numbers() -> None:
    """Its table is made from eval/results/scale-cpu.json, which holds every way, none failed, all with the same losses."""
    found = json.loads((ROOT / "eval" / "results" / "scale-cpu.json").read_text())
    shown = (ROOT / "docs" / "distributed.md").read_text().split("<!-- scale -->\n")[1].split("\n<!-- /scale -->")[0]
    assert shown == markdown_table(found)
    assert [row["way"] for row in found["rows"]] == ["one process", *SHARING_MODES, "target fsdp2", "target tensor"]
    assert all(row["error"] is None and row["largest_difference"] < 1e-5 for row in found["rows"])
    assert found["setting"]["processes"] == 2 and found["setting"]["versions"]["torch"]


def test_a_failed_way_says_why() -> None:
    """It stays in the table, with the reason in place of numbers."""
    rows = [{"way": "zero3", "tokens_per_second": None, "largest_difference": None, "error": "no DeepSpeed"}]
    assert markdown_table({"rows": rows}).splitlines()[-1] == "| zero3 | failed | no DeepSpeed |"
