"""Sweeps: one drafter with many trees, lengths, exits or prunings, decoded side by side and shown as one table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spectrain.config.choices import find_constructor
from spectrain.decoding.pruning import Pruning
from spectrain.drafters.capabilities import DrafterWithExits
from spectrain.errors import UserError
from spectrain.eval.noise import is_possible
from spectrain.eval.parts import Part, Results
from spectrain.eval.systems import System, describe
from spectrain.models.target import Target
from spectrain.runs.candidate import Candidate
from spectrain.trees import (
    Auto,
    Cast,
    Chain,
    DySpec,
    Eagle2,
    Entropy,
    OptTree,
    Sequoia,
    Static,
    TreeBuilder,
)

SWEPT: dict[str, Callable[[int, int], TreeBuilder]] = {
    "chain": lambda depth, budget: Chain(depth),
    "static": Static,
    "sequoia": Sequoia,
    "eagle2": Eagle2,
    "opt": OptTree,
    "dyspec": lambda depth, budget: DySpec(depth, budget, children="deterministic"),
    "entropy": Entropy,
    "cast": Cast,
    "auto": Auto,
}


ADAPTIVE_LENGTH = ("thompson", "policy")
"""Choices of `tree` that decide a chain's length while decoding."""


@dataclass
class TreeSweep(Part):
    """The named kinds of tree at every budget, as deep as the candidate's; a chain has one size."""

    names: Sequence[str]
    budgets: Sequence[int]

    def systems(self, candidate: Candidate, first: System) -> list[System]:
        depth = candidate.builder.depth
        builders: list[TreeBuilder] = [Chain(depth)] if "chain" in self.names else []
        builders += [SWEPT[name](depth, budget) for budget in self.budgets for name in self.names if name != "chain"]
        for other in builders:
            candidate.rule.check_children(other.children, other.is_chain)
        how = candidate.drafter, candidate.rule
        return [System(f"{one.name}-{one.budget}", describe(one), how[0], one, how[1]) for one in builders]


@dataclass
class LengthSweep(Part):
    """Chains of every length up to the candidate's depth, beside those whose length is decided while decoding."""

    def systems(self, candidate: Candidate, first: System) -> list[System]:
        builder, rule = candidate.builder, candidate.rule
        drawn = builder.children, builder.temperature, builder.seed
        builders = [Chain(depth, *drawn) for depth in range(1, builder.depth + 1)]
        adaptive = [find_constructor("tree", name) for name in ADAPTIVE_LENGTH]
        builders += [constructor(builder.depth, *drawn) for constructor in adaptive if constructor is not None]
        rule.check_children(builder.children, is_chain=True)
        return [System(f"length-{one.name}-{one.depth}", describe(one), candidate.drafter, one, rule) for one in builders]


@dataclass(frozen=True)
class Grid:
    """Systems that differ in two settings, for a table of rows and columns."""

    over: str  # what is swept
    row_name: str
    column_name: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def name(self, row: int, column: int) -> str:
        return f"{self.over}-{row}-{column}"

    def summary(self, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Every cell's numbers, and the fastest cell by measured speedup on these prompts."""
        cells = {(row, column): found[self.name(row, column)] for row in self.rows for column in self.columns}
        possible = [cell for cell in cells if is_possible(cells[cell]["speedup"])]
        best = max(possible or cells, key=lambda cell: cells[cell]["speedup"]["ratio"])
        rows = [[cells[row, column] for column in self.columns] for row in self.rows]
        table = {
            "acceptance_length": [[entry["acceptance_length"]["pooled"] for entry in entries] for entries in rows],
            "speedup": [[entry["speedup"]["ratio"] for entry in entries] for entries in rows],
        }
        if self.over == "prune":
            for key in ("node_layers_saved", "work_saved"):
                table[key] = [[entry["pruning"][key] for entry in entries] for entries in rows]
        names = {"over": self.over, "row": self.row_name, "column": self.column_name}
        return {**names, "rows": list(self.rows), "columns": list(self.columns), **table,
                "fastest": {self.row_name: best[0], self.column_name: best[1]},
                "fastest_speedup": cells[best]["speedup"]}  # fmt: skip


@dataclass
class ExitSweep(Part):
    """Chains of every length from every exit, drawn as the candidate's tree is."""

    exits: Sequence[int] | None
    depths: Sequence[int]

    def check(self, candidate: Candidate) -> None:
        if not isinstance(candidate.drafter, DrafterWithExits):
            raise UserError(
                "eval.sweep=exit: this drafter has no exits to choose from; use drafter=early_exit, or a run of "
                "recipe=layerskip"
            )

    def systems(self, candidate: Candidate, first: System) -> list[System]:
        assert isinstance(candidate.drafter, DrafterWithExits)
        rows = exits_of(candidate.target, self.exits)
        self.grid = Grid("exit", "exit_layer", "depth", rows, tuple(sorted(set(self.depths))))
        found, builder = [], candidate.builder
        for exit_layer in self.grid.rows:
            other = candidate.drafter.at_exit(exit_layer, candidate.target)
            for depth in self.grid.columns:
                label = f"exit {exit_layer}, chain of {depth}"
                chain = Chain(depth, builder.children, builder.temperature, builder.seed)
                found.append(System(self.grid.name(exit_layer, depth), label, other, chain, candidate.rule))
        return found

    def report(self, results: Results) -> dict[str, Any]:
        return {"sweep": self.grid.summary(results.entries)}


@dataclass
class PruneSweep(Part):
    """The same tree, pruned after every exit by every top k; not before the layers that drafting has run anyway."""

    exits: Sequence[int] | None
    tops: Sequence[int]

    def check(self, candidate: Candidate) -> None:
        check_pruned_tree(candidate.builder)

    def systems(self, candidate: Candidate, first: System) -> list[System]:
        drafter, builder, rule = candidate.drafter, candidate.builder, candidate.rule
        rows = exits_of(candidate.target, self.exits, max(1, drafter.cost.first_verified_layer()))
        self.grid = Grid("prune", "prune_layer", "prune_top", rows, tuple(sorted(set(self.tops))))
        found = []
        for layer in self.grid.rows:
            for top_k in self.grid.columns:
                label = f"pruned after {layer} layers, top {top_k}"
                pruning = Pruning(layer, top_k)
                pruning.check_settings(rule, candidate.target)
                found.append(System(self.grid.name(layer, top_k), label, drafter, builder, rule, pruning=pruning))
        return found

    def report(self, results: Results) -> dict[str, Any]:
        return {"sweep": self.grid.summary(results.entries)}


@dataclass
class PrunedTrees(Part):
    """The drafter's own trees are pruned, beside the same ones that are not."""

    layer: int
    top_k: int

    def check(self, candidate: Candidate) -> None:
        Pruning(self.layer, self.top_k).check_settings(candidate.rule, candidate.target)
        check_pruned_tree(candidate.builder)

    def own(self, candidate: Candidate, first: System) -> System:
        return replace(first, pruning=Pruning(self.layer, self.top_k))

    def systems(self, candidate: Candidate, first: System) -> list[System]:
        return [System("unpruned", "the same, not pruned", candidate.drafter, candidate.builder, candidate.rule)]


def check_pruned_tree(builder: TreeBuilder) -> None:
    """Refuse a builder that pruning would mislead."""
    if builder.learns_from_trees:
        raise UserError(
            f"tree={builder.name}: it learns from the trees that are verified, and pruned ones mislead it; use another tree"
        )


def exits_of(target: Target, exits: Sequence[int] | None, first: int = 1) -> tuple[int, ...]:
    """The exits that were asked for, or up to seven, evenly spaced."""
    last = target.num_layers - 1
    if exits is None:
        count = min(last + 1 - first, 7)
        return tuple(sorted({round(first + place * (last - first) / max(count - 1, 1)) for place in range(count)}))
    if wrong := [layer for layer in exits if not first <= layer <= last]:
        raise UserError(f"eval.exits={list(exits)}: {wrong[0]} is no exit here; {target.name} has those from {first} to {last}")
    return tuple(sorted(set(exits)))
