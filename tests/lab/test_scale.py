"""The committed comparison of ways to share training is complete."""

import json
from pathlib import Path

from lab.benchmarks.scale import SHARING_MODES, markdown_table

ROOT = Path(__file__).parents[2]


def test_the_committed_comparison_is_complete() -> None:
    """lab/results/scale-cpu.json holds every way; none failed, and all have the same losses."""
    results = json.loads((ROOT / "lab" / "results" / "scale-cpu.json").read_text())
    assert [row["way"] for row in results["rows"]] == [
        "one process",
        *SHARING_MODES,
        "target fsdp2",
        "target tensor",
    ]
    assert all(row["error"] is None and row["largest_difference"] < 1e-5 for row in results["rows"])
    assert results["setting"]["processes"] == 2 and results["setting"]["versions"]["torch"]


def test_a_failed_way_says_why() -> None:
    """It stays in the table, with the reason in place of numbers."""
    rows = [
        {
            "way": "zero3",
            "tokens_per_second": None,
            "largest_difference": None,
            "error": "no DeepSpeed",
        }
    ]
    assert markdown_table({"rows": rows}).splitlines()[-1] == "| zero3 | failed | no DeepSpeed |"
