"""Extensions of an evaluation: what it decodes, checks and writes in addition to the drafter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from spectrain.decoding.generation import Generation
from spectrain.decoding.session import PromptLoader
from spectrain.eval.metrics import SystemSummary, Turn
from spectrain.eval.systems import System
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate


@dataclass
class Results:
    """The results of decoding."""

    candidate: Candidate
    # The drafter's own system comes first.
    systems: list[System]
    # The turns of every system, by its name.
    turns: dict[str, list[Turn]]
    # The numbers of every system, by its name.
    summaries: dict[str, SystemSummary]
    # Folder that receives files.
    folder: Path


class EvalExtension:
    """An addition to the drafter's own evaluation. It adds nothing unless a subclass overrides a
    method.
    """

    # The drafter changes while it decodes: it keeps its own tree and decodes once.
    changes_drafter: bool = False

    def check(self, candidate: Candidate) -> None:
        """Raise UserError if the extension is invalid for this drafter, tree or rule."""

    def snapshot(self, candidate: Candidate) -> None:
        """Copy what the drafter loses when it is rounded to the target's dtype."""

    def adapt_system(self, candidate: Candidate, first: System) -> System:
        """Return the drafter's own system as this extension needs it."""
        return first

    def systems(self, candidate: Candidate, first: System) -> list[System]:
        """Return the systems to decode in turn with the drafter's own."""
        return []

    def prepare_systems(self, target: Target, systems: list[System], prompts: PromptLoader) -> None:
        """Prepare systems on prompts that are not scored, before trees are calibrated."""

    def begin(self) -> None:
        """Prepare for the first prompt, after everything has been warmed up."""

    def on_answers(self, answers: list[Generation]) -> None:
        """Read the drafter's answers to a batch of prompts."""

    def report(self, results: Results) -> dict[str, Any]:
        """Return the keys to add to summary.json, and write own files to the folder."""
        return {}

    def print_results(self, console: Console, summary: dict[str, Any]) -> None:
        """Print more of summary.json below the table of systems."""
