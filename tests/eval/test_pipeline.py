"""The pipeline of a score with a source that answers from a list: what any source gets for it."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from spectrain.eval.extensions import EvalExtension
from spectrain.eval.metrics import SystemSummary, Turn, measure_system
from spectrain.eval.noise import Noise, judge_speedup
from spectrain.eval.pipeline import (
    Answers,
    AnswerSource,
    Entries,
    SourceSetting,
    run_pipeline,
)
from spectrain.eval.selection import PromptedEvaluation
from tests.eval.test_metrics import TURNS

KNOWN = {"target": "listed", "recipe": "list", "drafter": {}, "device": "paper", "dtype": "float32"}


class View(EvalExtension):
    def print_results(self, console: Console, summary: dict[str, Any]) -> None:
        console.print(f"listed {summary['list']['answers']} answers")


class ListedAnswers(AnswerSource):
    """Answers from a list: the drafter's row has all turns, another one the first two."""

    template = None
    views = (View(),)

    def __init__(self) -> None:
        self.calls: list[str] = []

    def answer(self) -> Answers:
        self.calls.append("answer")
        return Answers({"drafter": TURNS, "chain": TURNS[:2]}, 3, Counter({"too long": 2}))

    def summarize(self, answers: Answers) -> dict[str, SystemSummary]:
        self.calls.append("summarize")
        return {name: summarize_turns(name, turns) for name, turns in answers.turns.items()}

    def measure_more(self, answers: Answers, summaries: Mapping[str, SystemSummary]) -> Entries:
        self.calls.append("measure_more")
        return Entries({"bounds": {}}, {"list": {"answers": len(answers.turns["drafter"])}})

    def describe(self, summary: SystemSummary) -> SourceSetting:
        self.calls.append("describe")
        return SourceSetting(KNOWN, 4, "greedy", False, {"engine": summary.engine})

    def write_more(self, answers: Answers, folder: Path) -> None:
        self.calls.append("write_more")
        assert not (folder / "summary.json").exists(), "it says that all files are there"
        (folder / "more.txt").write_text("more")


def summarize_turns(name: str, turns: list[Turn]) -> SystemSummary:
    numbers = measure_system(turns, is_chain=True)
    numbers["speedup"] = judge_speedup(numbers["speedup"], turns, Noise(0.0, None))
    return SystemSummary(**numbers, label=name, tree={"name": "chain", "depth": 3}, engine="list")


@pytest.mark.parametrize("has_report", [False, True])
def test_every_source_gets_the_same_files_summary_and_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], has_report: bool
) -> None:
    evaluation = PromptedEvaluation(report=has_report, max_new_tokens=9, limit=1)
    evaluation.skipped = Counter({"too long": 1, "with images": 1})
    source = ListedAnswers()
    folder = tmp_path / "eval" / "a"
    summary = run_pipeline(evaluation, source, folder)
    assert source.calls == ["answer", "summarize", "measure_more", "describe", "write_more"]
    files = {"summary.json", "samples.jsonl", "rounds.parquet", "prompts.parquet", "more.txt"}
    page = {"report.html"} if has_report else set()
    assert {path.name for path in folder.iterdir()} == files | page
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert summary["setting"] == {
        **KNOWN,
        "prompts": 3,
        "skipped": {"too long": 3, "with images": 1},
        "max_new_tokens": 9,
        "batch_size": 4,
        "rule": "greedy",
        "tree": {"name": "chain", "depth": 3},
        "guard": False,
        "engine": "list",
    }
    expected = {
        name: summarize_turns(name, turns).to_json()
        for name, turns in (
            ("drafter", TURNS),
            ("chain", TURNS[:2]),
        )
    }
    assert summary["compared"] == {"chain": expected["chain"]}
    assert {key: summary[key] for key in expected["drafter"]} == expected["drafter"]
    assert summary["list"] == {"answers": 3} and summary["bounds"] == {}
    printed = capsys.readouterr().out
    assert "list on listed: 3 prompts, 9 tokens" in printed and "listed 3 answers" in printed


def test_prompts_that_were_left_out_stay_counted_once(tmp_path: Path) -> None:
    """The evaluation's own count is no sum of several scores."""
    evaluation = PromptedEvaluation(report=False, limit=1)
    evaluation.skipped = Counter({"too long": 1})
    for number in range(2):
        summary = run_pipeline(evaluation, ListedAnswers(), tmp_path / str(number))
        assert summary["setting"]["skipped"] == {"too long": 3}
