"""Evaluation with grafted trees: the drafter's own ones, next to the same without grafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from spectrain.decoding.session import PromptLoader
from spectrain.errors import UserError
from spectrain.eval.extensions import EvalExtension, Results
from spectrain.eval.notes import EXTENSION_NOTES
from spectrain.eval.systems import System
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain_research.shared.early_head import fit_early_heads
from spectrain_research.shared.learning_builder import LearnsFromTrees

from .grafting import Grafting


@dataclass
class GraftedTrees(EvalExtension):
    """Grafts the drafter's own trees, and decodes with the same ones without grafts as well."""

    layer: int
    count: int
    steps: int
    rank: int

    def check(self, candidate: Candidate) -> None:
        Grafting(self.layer, self.count, self.steps).check_settings(
            candidate.rule, candidate.target
        )
        if isinstance(candidate.builder, LearnsFromTrees):
            raise UserError(
                f"tree={candidate.builder.name}: it learns from the trees that are verified, and "
                "grafted ones mislead it; use tree=eagle2"
            )

    def adapt_system(self, candidate: Candidate, first: System) -> System:
        grafting = Grafting(self.layer, self.count, self.steps)
        return replace(first, changes=(*first.changes, grafting))

    def systems(self, candidate: Candidate, first: System) -> list[System]:
        return [
            System(
                "ungrafted",
                "the same, not grafted",
                candidate.drafter,
                candidate.builder,
                candidate.rule,
            )
        ]

    def prepare_systems(self, target: Target, systems: list[System], prompts: PromptLoader) -> None:
        graftings = [
            change
            for system in systems
            for change in system.changes
            if isinstance(change, Grafting)
        ]
        if graftings and self.rank:
            fit_early_heads(target, graftings, prompts(), min(self.rank, target.width // 2))

    def report(self, results: Results) -> dict[str, Any]:
        grafting = results.systems[0].find_change("tree")
        return {"grafting": grafting.summarize_grafts()} if isinstance(grafting, Grafting) else {}


def describe_grafts(section: dict[str, Any]) -> Iterator[str]:
    """Say how many nodes were grafted and accepted."""
    yield (
        f"After {section['layer']} layers {section['grafts_per_round']:.2f} nodes per round "
        f"joined the tree in place of others, and {section['accepted_per_round']:.2f} of them "
        "were accepted."
    )


EXTENSION_NOTES["grafting"] = describe_grafts
