"""How often a demo's first sentence is right, from folders of finished demos that are made here."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lab.benchmarks.demo_runs import DemoRuns, demo_table
from spectrain.errors import UserError

GAIN = {"ratio": 1.5, "ci95": [1.4, 1.6]}


def write_run(
    folder: Path, after: float, rounds: int, gain: dict[str, Any], identical: int = 20
) -> None:
    """Write the score of a finished demo, whose drafter made 1 token per forward before training
    and 1.25 after the fit.
    """
    lossless = {"checked": 20, "identical": identical}
    length = {"pooled": after}
    drafters = {
        "drafter": {"pooled": after, "rounds": rounds},
        "start": {"pooled": 1.25, "rounds": 80},
        "untrained": {"pooled": 1.0, "rounds": 100},
    }
    summary = {
        "headline": ["A sentence."],
        "label": "drafter",
        "acceptance_length": length,
        "acceptance": {
            "chain": {
                "prompts": 20,
                "drafters": drafters,
                "training_gain": {"over": "untrained", **gain},
                "gain": {"over": "start", "ratio": 1.2, "ci95": [0.9, 1.4]},
            }
        },
        "speedup": {"ratio": 1.1, "ci95": [1.0, 1.2], "quotable": True},
        "noise": {"load": 0.5},
        "lossless": lossless,
        "compared": {"own": {"label": "own", "acceptance_length": length, "lossless": lossless}},
        "setting": {"training": {"steps": 150}, "commit": "a" * 40, "target": "smollm2"},
    }
    score = folder / "runs" / "eagle3-smollm2" / "eval" / "heldout"
    score.mkdir(parents=True)
    (score / "summary.json").write_text(json.dumps(summary))
    begin = score.parents[1] / "config.yaml"
    begin.write_text("")
    os.utime(begin, (1000, 1000))
    os.utime(score / "summary.json", (1300, 1300))


@pytest.fixture
def results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Three demos: of two the interval holds the gain of all, and one claims the other
    direction.
    """
    write_run(tmp_path / "2", 1.5, 100, GAIN)
    write_run(tmp_path / "10", 1.4, 300, {"ratio": 1.4, "ci95": [0.95, 1.9]}, identical=19)
    write_run(tmp_path / "9", 0.9, 100, {"ratio": 0.9, "ci95": [0.8, 0.99]})
    (tmp_path / "2.log").write_text("step 1\nreal\t6m30.0s\nuser\t1m0.0s\n")
    out = tmp_path / "results.json"
    DemoRuns((str(tmp_path / "*"),), busy=("9",), out=str(out)).run()
    printed = capsys.readouterr().out
    assert "9 (busy): A sentence. 150 steps, 5.0 min, 40 of 40 outputs identical" in printed
    written: dict[str, Any] = json.loads(out.read_text())
    return written


def test_sentences_are_judged_by_all_runs_together(results: dict[str, Any]) -> None:
    """Tokens and rounds of all runs are added; a sentence is right if its interval holds their
    ratio.
    """
    after = (1.5 * 100 + 1.4 * 300 + 0.9 * 100) / 500
    gain = results["gains"]["training"]
    assert (gain["before"], gain["after"]) == (1.0, pytest.approx(after))
    assert (gain["contains"], gain["decided"], gain["right"]) == (1, 2, 1)
    steps = results["gains"]["steps"]
    assert steps["ratio"] == pytest.approx(after / 1.25)
    assert (steps["contains"], steps["decided"], steps["right"]) == (3, 0, 3)
    rows = {row["name"]: row for row in results["runs"]}
    assert [*rows] == ["2", "9", "10"] and results["identical"] == 2
    right = {name: row["verdicts"]["training"]["right"] for name, row in rows.items()}
    assert right == {"2": False, "9": False, "10": True}
    assert [rows[name]["minutes"] for name in ("2", "9")] == [6.5, 5.0]


def test_the_table_marks_wrong_intervals(results: dict[str, Any]) -> None:
    """It has a row for each run, and an interval without the gain of all runs is bold."""
    table = demo_table(results)
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == ["| 2", "| 9", "| 10"]
    assert rows[0][8] == "**1.50 [1.40, 1.60]**" and rows[2][8] == "1.40 [0.95, 1.90]"
    assert "1 of 3 intervals contain it, 2 claim a direction, and 1 sentences are right" in table


def test_a_table_without_runs_says_so() -> None:
    """The page holds it until the first demo is recorded."""
    assert demo_table({"runs": [], "gains": {}, "identical": 0}).startswith("No finished demo")


def test_folders_without_a_demo_are_refused(tmp_path: Path) -> None:
    """One sentence says which folder, and what to give."""
    with pytest.raises(UserError, match="there is no such folder"):
        DemoRuns((str(tmp_path / "none"),))
    (tmp_path / "1").mkdir()
    with pytest.raises(UserError, match="it holds 0 files eval/heldout/summary.json"):
        DemoRuns((str(tmp_path / "1"),)).run()
    with pytest.raises(UserError, match="busy: no folder of runs has the name 7"):
        DemoRuns((str(tmp_path / "1"),), busy=("7",))
