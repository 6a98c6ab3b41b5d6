"""Scores that comparisons read: as evaluations write them, and as data alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spectrain.errors import UserError
from spectrain.eval.pipeline import run_pipeline
from spectrain.eval.selection import PromptedEvaluation
from spectrain_studies.axes.points import find_crossover
from spectrain_studies.comparison.recommendations import advise_axis, describe_missing
from spectrain_studies.comparison.scored_runs import ScoredRun, collect_axes
from tests.eval.test_pipeline import TURNS, ListedAnswers
from tests.settings.test_hostile import EVIL, canary

__all__ = ["canary"]


def test_a_score_of_any_source_is_read(tmp_path: Path) -> None:
    summary = run_pipeline(PromptedEvaluation(report=False), ListedAnswers(), tmp_path)
    scored = ScoredRun.read("a", tmp_path)
    assert [*scored.prompts()] == ["a", "b", "c"]
    drafted = sum(len(turn.drafted.output) - 1 for turn in TURNS)
    assert scored.columns("drafter")["tokens"].sum() == drafted
    axis = {"over": "batch", "points": []}
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "axis": axis}))
    assert collect_axes([ScoredRun.read("a", tmp_path)]) == {"batch": [{"name": "a", **axis}]}


def test_a_score_is_data(tmp_path: Path, canary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a summary names as its rule is looked up among the rules, never imported."""
    (tmp_path / "evil.py").write_text(EVIL.format(canary=str(canary)))
    monkeypatch.syspath_prepend(str(tmp_path))
    for rule in ({"_target_": "evil.Drafter"}, {"choice": "evil.Drafter"}):
        with pytest.raises(UserError, match="acceptance=evil.Drafter: there is no such choice"):
            ScoredRun(
                "one", tmp_path, {"setting": {"target": "tiny", "acceptance": rule}}, {}, None
            ).compared_setting("acceptance")
    assert not canary.exists()


def test_a_scenario_has_the_drafter_that_is_fastest_there() -> None:
    """The advice is taken at the largest common value and names no drafter where none pays;
    scenarios without a sweep are named."""

    def make_sweep(name: str, speedups: list[float]) -> dict[str, Any]:
        points = [
            {"value": 2**index, "speedup": value, "ci95": None}
            for index, value in enumerate(speedups)
        ]
        crossover = vars(find_crossover([point["value"] for point in points], speedups))
        return {"name": name, "over": "batch", "points": points, "crossover": crossover}

    quick = make_sweep("quick", [2.0, 0.9])
    steady = make_sweep("steady", [1.5, 1.2, 1.1])
    choice, because = advise_axis([quick, steady])
    assert choice == "steady" and because.startswith("1.20x at 2 prompts at once.")
    assert "quick: Drafting pays up to about 2 prompts at once." in because
    assert advise_axis([quick])[0] == "no drafter"
    missing, command = describe_missing({"many users", "long context"}) or ("", "")
    assert missing == "high temperature" and "eval.sweep=temperature" in command
