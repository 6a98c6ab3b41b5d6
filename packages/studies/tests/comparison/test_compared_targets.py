"""Runs of several targets in one comparison."""

from pathlib import Path
from typing import Any

import pytest

from spectrain.errors import UserError
from spectrain_studies.comparison.compare import read_runs
from spectrain_studies.comparison.table import print_comparison
from spectrain_studies.comparison.targets import compare_targets
from tests.eval.made_scores import write_score


def make_runs(folder: Path, **more: Any) -> list[Path]:
    runs = [folder / name for name in ("eagle3-small", "eagle3-large", "gkd-large")]
    write_score(runs[0], "heldout", plain=90, speedup=1.1, target="small")
    write_score(runs[1], "heldout", plain=30, speedup=1.6, target="large", shift=1)
    write_score(
        runs[2],
        "heldout",
        plain=30,
        speedup=1.3,
        target="large",
        shift=1,
        drafter={"choice": "causal"},
        **more,
    )
    return runs


def test_each_target_has_its_own_recommendation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows keep their own numbers, and a drafter is recommended among those of its target; a
    family of both targets has its tokens per forward on each.
    """
    runs = read_runs(make_runs(tmp_path), "heldout", "batch8")
    comparison = compare_targets(runs, tmp_path)
    assert [(row["name"], row["target"]) for row in comparison["rows"]] == [
        ("eagle3-small", "small"),
        ("eagle3-large", "large"),
        ("gkd-large", "large"),
    ]
    assert [row["systems"][0]["speedup"]["ratio"] for row in comparison["rows"]] == [1.1, 1.6, 1.3]
    choices = {entry["goal"]: entry["choice"] for entry in comparison["recommendations"]}
    assert choices["one user on small"].startswith("eagle3-small")
    assert choices["one user on large"].startswith("eagle3-large")
    assert "eagle3 by target" in choices and "causal by target" not in choices
    print_comparison(comparison)
    shown = " ".join(capsys.readouterr().out.split())
    assert "small, large" in shown and "only speedups and tokens per forward" in shown


def test_other_questions_are_refused(tmp_path: Path) -> None:
    """Targets may differ, but not the rule or the number of tokens."""
    runs = read_runs(make_runs(tmp_path, rule="match"), "heldout", "batch8")
    with pytest.raises(UserError, match="scored with rule match"):
        compare_targets(runs, tmp_path)


DAMAGED = {
    "summary.json": (
        b"{}",
        b'{"setting": {}}',
        b'{"setting": {"target": "a", "dtype": "b"}}',
        b"[]",
    ),
    "samples.jsonl": (b"{", b"[1]", b"{}", b"\xff"),
    "prompts.parquet": (b"", b"PAR1", bytes(100)),
}


@pytest.mark.parametrize(
    "name, content", [(name, content) for name in DAMAGED for content in DAMAGED[name]]
)
def test_a_damaged_score_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    folders = make_runs(tmp_path)
    (folders[0] / "eval" / "heldout" / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"eagle3-small/eval/heldout/{name}: it [^\n]*again"):
        runs = read_runs(folders, "heldout", "batch8")
        compare_targets(runs, tmp_path)
        runs[0].columns("drafter")
