"""What an evaluation decodes, checks and writes beside the drafter: each such thing is a part of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrain.decoding.generation import Generation
from spectrain.eval.metrics import Turn
from spectrain.eval.systems import System
from spectrain.runs.candidate import Candidate


@dataclass
class Results:
    """What decoding gave."""

    candidate: Candidate
    systems: list[System]  # the drafter's own first
    turns: dict[str, list[Turn]]  # of every system, by its name
    entries: dict[str, dict[str, Any]]  # the numbers of every system, by its name
    folder: Path  # where files go


class Part:
    """One thing beside the drafter. It adds nothing, unless a subclass says otherwise."""

    def check(self, candidate: Candidate) -> None:
        """Raise where it is not valid for this drafter, tree or rule."""

    def keep(self, candidate: Candidate) -> None:
        """Take from the drafter, as it was saved, what is lost when it is rounded to the target's dtype."""

    def own(self, candidate: Candidate, first: System) -> System:
        """The drafter's own system, as this part needs it."""
        return first

    def systems(self, candidate: Candidate, first: System) -> list[System]:
        """What is decoded in turn with it."""
        return []

    def begin(self) -> None:
        """Called once before the first prompt, when everything has been warmed up."""

    def see(self, answers: list[Generation]) -> None:
        """The drafter's answers to a batch of prompts."""

    def report(self, results: Results) -> dict[str, Any]:
        """What it adds to summary.json; its own files are written to the folder."""
        return {}
