"""Batch sizes by lengths of context, `eval.sweep=grid`: where drafting pays if both grow (MagicDec,
arXiv 2408.11049).

The scored texts of each length are decoded again in batches of each size, without a drafter and
with it, round by round in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from spectrain.eval.columns import known_interval
from spectrain.eval.context import format_length
from spectrain.eval.extensions import Results
from spectrain.files import write_text
from spectrain_studies.axes.points import Crossover, find_crossover
from spectrain_studies.axes.sweep import BatchSweep, group_by_length
from spectrain_studies.axes.tables import markdown_table, print_cells

Grid = dict[str, Any]
"""The entry `grid` of a summary."""


@dataclass
class BatchContextSweep(BatchSweep):
    """Decodes the texts of every length of context in batches of several sizes."""

    def report(self, results: Results) -> dict[str, Any]:
        """Return `grid`: for each length the points by size and the size up to which drafting pays;
        write its table.
        """
        first = results.systems[0]
        rows = []
        for length, texts in group_by_length(results.turns[first.name]).items():
            points = [point for point, _ in self.measure_sizes(results, texts).values()]
            columns = [
                [point.value for point in points],
                [point.speedup for point in points],
                [point.ci95 for point in points],
            ]
            crossover = find_crossover(*columns)  # type: ignore[arg-type]
            print(
                f"context {format_length(length)}: "
                + ", ".join(f"{point.speedup:.2f}x at {point.value:g}" for point in points),
                flush=True,
            )
            rows.append(
                {
                    "context": length,
                    "points": [asdict(point) for point in points],
                    "crossover": asdict(crossover),
                }
            )
        grid = {"system": first.label, "rows": rows, "left_out": self.left_out}
        sentences = "\n".join(f"- {sentence}" for sentence in describe_grid(grid))
        table = markdown_table(grid_titles(grid), [*grid_cells(grid)])
        write_text(results.folder / "grid.md", f"{table}\n\n{sentences}\n")
        return {"grid": grid}

    def print_results(self, console: Console, summary: dict[str, Any]) -> None:
        grid = summary["grid"]
        title = "speedup by prompts at once and context (tokens per forward)"
        print_cells(console, title, grid_titles(grid), grid_cells(grid))
        for sentence in describe_grid(grid):
            console.print(sentence, markup=False)


def list_sizes(grid: Grid) -> list[int]:
    """Return all measured batch sizes."""
    return sorted({int(point["value"]) for row in grid["rows"] for point in row["points"]})


def grid_titles(grid: Grid) -> list[str]:
    """Return the titles of the grid's table."""
    return ["context", *(f"{size} at once" for size in list_sizes(grid)), "pays up to"]


def grid_cells(grid: Grid) -> Iterator[list[str]]:
    """Yield a line of cells for each length of context. A speedup whose interval excludes 1 is
    certain and marked with *.
    """
    for row in grid["rows"]:
        points = {int(point["value"]): point for point in row["points"]}
        cells = [format_point(points[size]) if size in points else "" for size in list_sizes(grid)]
        yield [format_length(row["context"]), *cells, format_stop(row)]


def format_point(point: dict[str, Any]) -> str:
    """Format the speedup of a cell with its tokens per forward."""
    ends = known_interval(point["ci95"])
    mark = "*" if ends is not None and not ends[0] <= 1 <= ends[1] else ""
    return f"{point['speedup']:.2f}{mark} ({point['acceptance_length']:.2f})"


def format_stop(row: dict[str, Any]) -> str:
    """Format the number of prompts at once up to which drafting pays at one length."""
    crossover = Crossover(**row["crossover"])
    if crossover.kind == "crosses":
        assert crossover.value is not None
        return f"about {crossover.value:.3g}"
    largest = max(point["value"] for point in row["points"])
    return f"{largest:g} or more" if crossover.kind == "always" else "none"


def format_certain(row: dict[str, Any]) -> str:
    """Format the number of prompts at once up to which drafting surely pays at one length."""
    certain = row["crossover"]["certain"]
    return "none" if certain is None else f"{certain:g}"


def describe_grid(grid: Grid) -> Iterator[str]:
    """Say where the line runs between where drafting pays and where it does not, and how it moves
    with the context.
    """
    rows = grid["rows"]
    line = ", ".join(f"{format_length(row['context'])}: {format_stop(row)}" for row in rows)
    yield f"Drafting pays up to so many prompts at once, by context ({grid['system']}): {line}."
    if any(point["ci95"] for row in rows for point in row["points"]):
        certain = ", ".join(
            f"{format_length(row['context'])}: {format_certain(row)}" for row in rows
        )
        yield f"All intervals lie above 1 up to so many at once: {certain}."
    if trend := describe_trend(rows):
        yield trend
    if any(point["ci95"] is None for row in rows for point in row["points"]):
        yield (
            "* marks a speedup whose 95 % interval excludes 1; batches that share prompts "
            "have no interval."
        )
    checked = [point for row in rows for point in row["points"] if point["identical"] is not None]
    if checked:
        identical = sum(point["identical"] for point in checked)
        total = sum(point["checked"] for point in checked)
        yield (
            f"Identical to decoding each text alone without a drafter: {identical} of {total} "
            "answers."
        )
    yield from grid["left_out"]


def describe_trend(rows: Sequence[dict[str, Any]]) -> str | None:
    """Say whether drafting gains or loses by longer contexts at the largest common batch; None for
    one length.
    """
    common = set.intersection(*({int(point["value"]) for point in row["points"]} for row in rows))
    if len(rows) < 2 or not common:
        return None
    size = max(common)
    ends = [
        next(point["speedup"] for point in row["points"] if int(point["value"]) == size)
        for row in (rows[0], rows[-1])
    ]
    lengths = [format_length(row["context"]) for row in (rows[0], rows[-1])]
    return (
        f"With {size} at once, the speedup goes from {ends[0]:.2f} at {lengths[0]} to "
        f"{ends[1]:.2f} at {lengths[1]} tokens of context."
    )
