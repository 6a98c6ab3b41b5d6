"""Sweeps: one drafter with many trees, exits or prunings, decoded side by side and shown as one table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spectrain.decoding.acceptance import AcceptanceRule
from spectrain.decoding.pruning import Pruning
from spectrain.drafters.base import Drafter
from spectrain.errors import UserError
from spectrain.eval.systems import System, describe
from spectrain.models.target import Target
from spectrain.trees import Auto, Cast, Chain, DySpec, Eagle2, Entropy, OptTree, Sequoia, Static, TreeBuilder

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


def tree_systems(
    drafter: Drafter, builder: TreeBuilder, rule: AcceptanceRule, budgets: Sequence[int], names: Sequence[str]
) -> list[System]:
    """The named kinds of tree at every budget, as deep as `builder`; a chain has one size."""
    builders: list[TreeBuilder] = [Chain(builder.depth)] if "chain" in names else []
    builders += [SWEPT[name](builder.depth, budget) for budget in budgets for name in names if name != "chain"]
    for other in builders:
        rule.check(other.children, other.is_chain)
    return [System(f"{other.name}-{other.budget}", describe(other), drafter, other, rule) for other in builders]


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
        best = max(cells, key=lambda cell: cells[cell]["speedup"]["ratio"])
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


def exit_systems(
    target: Target,
    drafter: Drafter,
    builder: TreeBuilder,
    rule: AcceptanceRule,
    exits: Sequence[int] | None,
    depths: Sequence[int],
) -> tuple[Grid, list[System]]:
    """Chains of every length from every exit, drawn as `builder` draws."""
    if drafter.abilities.exits is None:
        raise UserError(
            "eval.sweep=exit: this drafter has no exits to choose from; use drafter=early_exit, or a run of recipe=layerskip"
        )
    grid = Grid("exit", "exit_layer", "depth", _exits(target, exits), tuple(sorted(set(depths))))
    systems = []
    for exit_layer in grid.rows:
        other = drafter.abilities.exits.at(drafter, exit_layer, target)
        for depth in grid.columns:
            label = f"exit {exit_layer}, chain of {depth}"
            chain = Chain(depth, builder.children, builder.temperature, builder.seed)
            systems.append(System(grid.name(exit_layer, depth), label, other, chain, rule))
    return grid, systems


def prune_systems(
    target: Target,
    drafter: Drafter,
    builder: TreeBuilder,
    rule: AcceptanceRule,
    exits: Sequence[int] | None,
    tops: Sequence[int],
) -> tuple[Grid, list[System]]:
    """The same tree, pruned after every exit by every top k; not before the layers that drafting has run anyway."""
    first = max(1, drafter.cost.verified_from(drafter))
    grid = Grid("prune", "prune_layer", "prune_top", _exits(target, exits, first), tuple(sorted(set(tops))))
    systems = []
    for layer in grid.rows:
        for top_k in grid.columns:
            label = f"pruned after {layer} layers, top {top_k}"
            pruning = Pruning(layer, top_k)
            pruning.check(rule, target)
            systems.append(System(grid.name(layer, top_k), label, drafter, builder, rule, pruning=pruning))
    return grid, systems


def _exits(target: Target, exits: Sequence[int] | None, first: int = 1) -> tuple[int, ...]:
    """The exits that were asked for, or up to seven, evenly spaced."""
    last = target.num_layers - 1
    if exits is None:
        count = min(last + 1 - first, 7)
        return tuple(sorted({round(first + place * (last - first) / max(count - 1, 1)) for place in range(count)}))
    if wrong := [layer for layer in exits if not first <= layer <= last]:
        raise UserError(f"eval.exits={list(exits)}: {wrong[0]} is no exit here; {target.name} has those from {first} to {last}")
    return tuple(sorted(set(exits)))
