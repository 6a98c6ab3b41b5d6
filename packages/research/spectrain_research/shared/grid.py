"""Sweeps of two settings: one system for each pair, and a table of all pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from spectrain.errors import UserError
from spectrain.eval.columns import format_number, format_speedup, format_speedup_interval
from spectrain.eval.extensions import EvalExtension, Results
from spectrain.eval.metrics import SystemSummary
from spectrain.eval.noise import is_possible
from spectrain.models.target import Target


@dataclass(frozen=True)
class Grid:
    """Systems that differ in two settings, which are the rows and columns of a table."""

    # The setting eval.sweep.
    over: str
    row_name: str
    column_name: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def cell_name(self, row: int, column: int) -> str:
        return f"{self.over}-{row}-{column}"

    def summary(self, systems: dict[str, SystemSummary]) -> dict[str, Any]:
        """Return the entry `sweep` of summary.json: every cell's numbers, and the cell with the
        largest measured speedup.
        """
        cells = {
            (row, column): systems[self.cell_name(row, column)]
            for row in self.rows
            for column in self.columns
        }
        possible = [cell for cell, system in cells.items() if is_possible(vars(system.speedup))]
        best = max(possible or cells, key=lambda cell: cells[cell].speedup.ratio)
        rows = [[cells[row, column] for column in self.columns] for row in self.rows]
        table = {
            "acceptance_length": [[cell.acceptance_length.pooled for cell in row] for row in rows],
            "speedup": [[cell.speedup.ratio for cell in row] for row in rows],
        }
        if self.over == "prune":
            for key in ("node_layers_saved", "work_saved"):
                table[key] = [[(cell.pruning or {})[key] for cell in row] for row in rows]
        names = {"over": self.over, "row": self.row_name, "column": self.column_name}
        return {
            **names,
            "rows": list(self.rows),
            "columns": list(self.columns),
            **table,
            "fastest": {self.row_name: best[0], self.column_name: best[1]},
            "fastest_speedup": vars(cells[best].speedup),
        }


class GridSweep(EvalExtension):
    """Decodes with every pair of two settings."""

    grid: Grid

    def report(self, results: Results) -> dict[str, Any]:
        return {"sweep": self.grid.summary(results.summaries)}

    def print_results(self, console: Console, summary: dict[str, Any]) -> None:
        print_sweep(console, summary)


def print_sweep(console: Console, summary: dict[str, Any]) -> None:
    """Print a sweep of two settings as a table, and the fastest pair."""
    sweep = summary["sweep"]
    console.print(sweep_table(summary))
    entries = [
        entry["lossless"]
        for name, entry in summary["compared"].items()
        if name.startswith(f"{sweep['over']}-")
    ]
    if entries and all(entry and entry["identical"] is not None for entry in entries):
        identical, checked = (
            sum(entry[key] for entry in entries) for key in ("identical", "checked")
        )
        console.print(
            f"Identical in all {len(entries)} settings: {identical} of {checked} answers."
        )
    best = sweep["fastest_speedup"]
    settings = " ".join(f"{key}={value}" for key, value in sweep["fastest"].items())
    unpruned = (
        f", unpruned {format_speedup(summary['speedup'], 'x')}" if sweep["over"] == "prune" else ""
    )
    speedup = f"{format_speedup(best, 'x')} [{format_speedup_interval(best)}]{unpruned}"
    console.print(
        f"Fastest on these prompts: {settings}, {speedup}; others may be as fast.", markup=False
    )


def sweep_table(summary: dict[str, Any]) -> Table:
    """Return a table with a cell for every pair of settings."""
    sweep = summary["sweep"]
    pruned = sweep["over"] == "prune"
    content = (
        "tokens per forward, node-layers saved, speedup"
        if pruned
        else "tokens per forward, speedup"
    )
    table = Table(title=f"{content} by {sweep['row']} and {sweep['column']}")
    table.add_column(f"{sweep['row']} \\ {sweep['column']}", justify="right")
    for column in sweep["columns"]:
        table.add_column(str(column), justify="right")
    for i, row in enumerate(sweep["rows"]):
        cells = []
        for j, column in enumerate(sweep["columns"]):
            speedup = summary["compared"][f"{sweep['over']}-{row}-{column}"]["speedup"]
            saved = f"  {sweep['node_layers_saved'][i][j]:.1%}" if pruned else ""
            cells.append(
                f"{format_number(sweep['acceptance_length'][i][j])}{saved}  "
                f"{format_speedup(speedup, 'x')}"
            )
        table.add_row(str(row), *cells)
    return table


def exits_of(target: Target, exits: Sequence[int] | None, first: int = 1) -> tuple[int, ...]:
    """Return the requested exits, or up to seven that are evenly spaced."""
    last = target.num_layers - 1
    if exits is None:
        count = min(last + 1 - first, 7)
        return tuple(
            sorted(
                {round(first + step * (last - first) / max(count - 1, 1)) for step in range(count)}
            )
        )
    if invalid := [layer for layer in exits if not first <= layer <= last]:
        raise UserError(
            f"eval.exits={list(exits)}: {invalid[0]} is no exit here; {target.name} has those "
            f"from {first} to {last}"
        )
    return tuple(sorted(set(exits)))
