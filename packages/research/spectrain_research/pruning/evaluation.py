"""Evaluation with pruned trees: the drafter's own ones, or a sweep over layers and numbers of
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spectrain.decoding.session import PromptLoader
from spectrain.drafters.base import drafting_cost
from spectrain.errors import UserError
from spectrain.eval.extensions import EvalExtension
from spectrain.eval.systems import System
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.trees.base import TreeBuilder
from spectrain_research.shared.early_head import fit_early_heads
from spectrain_research.shared.grid import Grid, GridSweep, exits_of
from spectrain_research.shared.learning_builder import LearnsFromTrees

from .pruning import Pruning


class PruningExtension(EvalExtension):
    """Fits the early heads of all systems that prune."""

    rank: int

    def prepare_systems(self, target: Target, systems: list[System], prompts: PromptLoader) -> None:
        prunings = [
            change for system in systems for change in system.changes if isinstance(change, Pruning)
        ]
        if prunings and self.rank:
            fit_early_heads(target, prunings, prompts(), min(self.rank, target.width // 2))


@dataclass
class PruneSweep(PruningExtension, GridSweep):
    """Decodes with the same tree, pruned after every exit by every top k; the layers that
    drafting runs are never pruned.
    """

    exits: Sequence[int] | None
    tops: Sequence[int]
    rank: int

    def check(self, candidate: Candidate) -> None:
        check_pruned_tree(candidate.builder)

    def systems(self, candidate: Candidate, first: System) -> list[System]:
        drafter, builder, rule = candidate.drafter, candidate.builder, candidate.rule
        rows = exits_of(
            candidate.target, self.exits, max(1, drafting_cost(drafter).first_verified_layer())
        )
        self.grid = Grid("prune", "prune_layer", "prune_top", rows, tuple(sorted(set(self.tops))))
        systems = []
        for layer in self.grid.rows:
            for top_k in self.grid.columns:
                label = f"pruned after {layer} layers, top {top_k}"
                pruning = Pruning(layer, top_k)
                pruning.check_settings(rule, candidate.target)
                systems.append(
                    System(
                        self.grid.cell_name(layer, top_k),
                        label,
                        drafter,
                        builder,
                        rule,
                        changes=(pruning,),
                    )
                )
        return systems


@dataclass
class PrunedTrees(PruningExtension):
    """Prunes the drafter's own trees, and decodes with the same ones unpruned as well."""

    layer: int
    top_k: int
    rank: int

    def check(self, candidate: Candidate) -> None:
        Pruning(self.layer, self.top_k).check_settings(candidate.rule, candidate.target)
        check_pruned_tree(candidate.builder)

    def adapt_system(self, candidate: Candidate, first: System) -> System:
        return replace(first, changes=(*first.changes, Pruning(self.layer, self.top_k)))

    def systems(self, candidate: Candidate, first: System) -> list[System]:
        return [
            System(
                "unpruned",
                "the same, not pruned",
                candidate.drafter,
                candidate.builder,
                candidate.rule,
            )
        ]


def check_pruned_tree(builder: TreeBuilder) -> None:
    """Refuse a builder that learns from verified trees, which pruning would mislead."""
    if isinstance(builder, LearnsFromTrees):
        raise UserError(
            f"tree={builder.name}: it learns from the trees that are verified, and pruned ones "
            "mislead it; use tree=auto"
        )
