"""The one pipeline of a score, whatever answers the prompts:

    prompts -> answers of every row, in turn -> numbers -> summary.json and other files -> table

What differs is an `AnswerSource`: our own engine (`eval/run.py`) or running servers. A row is one
way to decode, as the drafter with a tree, a baseline, or a number of requests at once.
"""

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spectrain.data.chat_template import ChatTemplate
from spectrain.eval.columns import DRAFTER
from spectrain.eval.extensions import EvalExtension
from spectrain.eval.metrics import SystemSummary, Turn
from spectrain.eval.page import write_report
from spectrain.eval.report import print_table
from spectrain.eval.selection import PromptedEvaluation
from spectrain.eval.summary import (
    make_summary,
    sample_line,
    write_lines,
    write_prompts,
    write_rounds,
)
from spectrain.files import write_text
from spectrain.output.verbosity import result_output

UNKNOWN_DTYPE = "the server's"
"""The dtype in the setting of a score on a server, which does not say it."""


@dataclass
class Answers:
    """What a source answered."""

    # Row -> its answers, each paired with that without a drafter: tokens, seconds and the counters
    # of rounds. The drafter's own row is DRAFTER.
    turns: dict[str, list[Turn]]
    num_prompts: int
    # Reason -> number of turns that were left out.
    left_out: Counter[str] = field(default_factory=Counter)


@dataclass
class Entries:
    """What else was measured, by the key of summary.json."""

    # What limits the speedup: entries that stand before those of the other rows.
    limits: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)


@dataclass
class SourceSetting:
    """What the numbers of a source depend on: entries of `setting` in summary.json."""

    # What is known of the drafter and its target.
    subject: dict[str, Any]
    # Prompts that are answered together.
    batch_size: int
    rule: str
    has_guard: bool
    engine: dict[str, Any]


class AnswerSource(ABC):
    """Answers prompts with the drafter and without it. The methods are called in their order."""

    # Renders the prompts; None where a server does.
    template: ChatTemplate | None
    # What prints more below the table.
    views: Sequence[EvalExtension] = ()

    @abstractmethod
    def answer(self) -> Answers:
        """Answer the prompts for every row; raise RunError if nothing was answered."""

    @abstractmethod
    def summarize(self, answers: Answers) -> Mapping[str, SystemSummary]:
        """Return the numbers of every row, and of its outputs whether they are the target's."""

    @abstractmethod
    def measure_more(self, answers: Answers, summaries: Mapping[str, SystemSummary]) -> Entries:
        """Return what else is measured; files of its own may go to the folder of the score."""

    @abstractmethod
    def describe(self, summary: SystemSummary) -> SourceSetting:
        """Return what the numbers depend on; `summary` is that of the drafter's own row."""

    def write_more(self, answers: Answers, folder: Path) -> None:
        """Write further files of the score."""

    def show_progress(self) -> AbstractContextManager[Any]:
        """Return what shows the progress until everything is written."""
        return nullcontext()

    def print_more(self, folder: Path) -> None:
        """Print more below the table and its sentences, from the files of the score."""


def run_pipeline(
    evaluation: PromptedEvaluation, source: AnswerSource, folder: Path
) -> dict[str, Any]:
    """Score what a source answers: write the results to `folder`, print the table, and return the
    content of summary.json.
    """
    with source.show_progress():
        summary = write_results(evaluation, source, folder)
    with result_output():
        print_table(summary, source.views)
        source.print_more(folder)
    return summary


def write_results(
    evaluation: PromptedEvaluation, source: AnswerSource, folder: Path
) -> dict[str, Any]:
    """Measure what a source answers and write all files; return the content of summary.json."""
    answers = source.answer()
    summaries = source.summarize(answers)
    folder.mkdir(parents=True, exist_ok=True)
    entries = source.measure_more(answers, summaries)
    setting = source.describe(summaries[DRAFTER])
    skipped = evaluation.skipped + answers.left_out
    filler = evaluation.context_filler
    shared = {
        "prompts": answers.num_prompts,
        **({} if filler is None else {"context": filler.describe()}),
        "skipped": dict(skipped),
        "max_new_tokens": evaluation.max_new_tokens,
        "batch_size": setting.batch_size,
        "rule": setting.rule,
        "tree": summaries[DRAFTER].tree,
        "guard": setting.has_guard,
    }
    depends_on = {**setting.subject, **shared, **setting.engine}
    summary = make_summary(summaries, entries.limits, entries.sections, depends_on)
    lines = [sample_line(turn, source.template) for turn in answers.turns[DRAFTER]]
    write_lines(folder / "samples.jsonl", lines)
    write_rounds(folder / "rounds.parquet", answers.turns)
    write_prompts(folder / "prompts.parquet", answers.turns)
    source.write_more(answers, folder)
    # It comes after the others and says that all are there.
    write_text(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    if evaluation.report:
        write_report(folder / "report.html", [folder])
    return summary
