"""Plans, model cards and comparisons say what drafting can gain in an engine that was measured
on this machine.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from packages.serve.tests.times.test_row_times import make_times
from spectrain.config.spec import RunSpec
from spectrain.export.card import gain_section, read_scores
from spectrain.export.targets import TargetFiles
from spectrain_serve.times.recommendations import advise_engines, advise_plan
from spectrain_serve.times.row_times import DrafterTimes, RoundTime, Spread, save_times
from spectrain_studies.comparison.scored_runs import ScoredRun

# Two drafted tokens are accepted in 0.6 and 0.3 of the rounds.
SUMMARY = {
    "tree": {"name": "chain"},
    "acceptance_by_depth": [0.6, 0.5],
    "setting": {"target": "tiny"},
}
TIMES = make_times({1: 0.01, 2: 0.014, 3: 0.016})
SLOW_ROUNDS = (RoundTime(64, 1, Spread(0.04, 0.04, 0.04, 9)),)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECTRAIN_CACHE", str(tmp_path / "cache"))


def make_spec(*words: str) -> RunSpec:
    nodes = {"target": {"_target_": "spectrain.models.loading.load_tiny"}}
    if words:
        nodes["server"] = {
            "_target_": "spectrain_serve.engines.llamacpp_server.LlamaCppServer",
            "threads": 1,
        }
    return replace(RunSpec.from_nodes(nodes), overrides=("recipe=eagle3", *words))


def test_a_plan_has_the_gain_or_the_command_that_measures_it() -> None:
    words = ("target=tiny", "server=llamacpp", "server.threads=1")
    assert advise_plan(make_spec(), None) == []
    (hint,) = advise_plan(make_spec(*words), None)
    assert hint.endswith("spectrain bench engine target=tiny server=llamacpp server.threads=1")
    save_times(replace(TIMES, threads=2))
    assert advise_plan(make_spec(*words), None) == [hint]
    save_times(TIMES)
    (sentence,) = advise_plan(make_spec(*words), [0.6, 0.3])
    # 1.9 tokens in 1.6 forwards.
    assert (
        "In llama.cpp 1.0 (float32, 1 thread" in sentence
        and "at most 1.19x, with 2 drafted" in sentence
    )
    assert (
        "With plan.acceptance_rates=[0.6, 0.3]" in sentence
        and "measured acceptance" not in sentence
    )


def test_a_card_has_the_gain_in_the_engines_of_its_layout(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "eval" / "heldout").mkdir(parents=True)
    (run / "eval" / "heldout" / "summary.json").write_text(json.dumps(SUMMARY))
    assert gain_section(["llamacpp"], TargetFiles("tiny"), run, read_scores(run)) == []
    save_times(TIMES)
    assert gain_section(["vllm"], TargetFiles("tiny"), run, read_scores(run)) == []
    assert "at most 1.19x" in "\n".join(
        gain_section(["vllm", "llamacpp"], TargetFiles("tiny"), run, read_scores(run))
    )


def test_a_comparison_names_the_drafter_that_gains_most(tmp_path: Path) -> None:
    weaker = {**SUMMARY, "acceptance_by_depth": [0.3, 0.5]}
    folders = {name: tmp_path / name / "eval" / "heldout" for name in ("strong", "weak")}
    runs = [
        ScoredRun(name, folders[name], summary, {})
        for name, summary in (("strong", SUMMARY), ("weak", weaker))
    ]
    assert advise_engines(runs) == []
    save_times(TIMES)
    (advice,) = advise_engines(runs)
    assert (advice["goal"], advice["choice"]) == ("in llama.cpp", "strong") and "1.19x" in advice[
        "because"
    ]
    (advice,) = advise_engines(runs[1:])
    assert advice["choice"] == "no drafter" and "weak's chain" in advice["because"]
    # The rounds of a drafter that were timed themselves count in place of the forwards alone.
    save_times(replace(TIMES, drafter=DrafterTimes(str(tmp_path / "strong"), SLOW_ROUNDS)))
    (advice,) = advise_engines(runs[:1])
    assert advice["choice"] == "no drafter" and "predicted to reach 0.40x" in advice["because"]
