"""The table that `spectrain compare` prints, and the one for a page in Markdown."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spectrain.eval.columns import (
    RUN_COLUMNS,
    SYSTEM_COLUMNS,
    TEXT_POSITION_COLUMNS,
    Column,
    ComparisonTable,
    label_row,
    list_groups,
)
from spectrain.eval.report import open_console
from spectrain_studies.axes.tables import axis_markdown, print_axis

# After a run's name: what its output is lossless to.
MARKS = {"target": "", "trained target": "*", "nothing": "!"}


def comparison_columns(table: ComparisonTable) -> tuple[list[Column], list[Column]]:
    """Return the columns of systems and of runs in a table of a comparison."""
    systems, runs = (
        [column for column in columns if table in column.shown_in]
        for columns in (SYSTEM_COLUMNS, RUN_COLUMNS)
    )
    return systems, runs


def comparison_titles(table: ComparisonTable) -> list[str]:
    """Return the titles of a table of a comparison."""
    return [
        "drafter",
        "tree",
        *(column.title for columns in comparison_columns(table) for column in columns),
    ]


def comparison_cells(
    run: dict[str, Any], table: ComparisonTable, join: Callable[[str, str], str]
) -> Iterator[list[str]]:
    """Return one line of cells for each system of a run; `join` puts a value and its interval
    into one cell.
    """
    systems, runs = comparison_columns(table)
    for number, entry in enumerate(run["systems"]):
        values = [(column.cell(entry), column.interval_cell(entry)) for column in systems]
        yield [
            run["label"] + MARKS[run["lossless_to"]] if number == 0 else "",
            label_row(entry),
            *(join(value, interval) if interval else value for value, interval in values),
            *(column.cell(run) if number == 0 else "" for column in runs),
        ]


def print_comparison(comparison: dict[str, Any]) -> None:
    """Print one line for each drafter and tree, then which of them to take."""
    setting = comparison["setting"]
    console = open_console()
    budget = f", {setting['budget']} each" if setting.get("budget") else ""
    table = Table(
        title=(
            f"{setting['target']}: {setting['prompts']} prompts, {setting['max_new_tokens']} "
            f"tokens{budget}; {setting['device']}, {setting['dtype']}"
        ),
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for number, title in enumerate(comparison_titles("terminal")):
        folds = title in ("drafter", "tree", "training")
        justify = "right" if number > 1 else "left"
        lines = (
            title.replace(" per ", " per\n")
            .replace("batched ", "batched\n")
            .replace("trained ", "trained\n")
        )
        table.add_column(lines, justify=justify, overflow="fold", no_wrap=not folds)  # type: ignore[arg-type]
    for row in comparison["rows"]:
        for cells in comparison_cells(row, "terminal", "{}\n{}".format):
            table.add_row(*cells)
    console.print(table)
    if (positions := position_table(comparison["rows"])) is not None:
        console.print(positions)
    for axes in comparison.get("axes", {}).values():
        print_axis(console, axes)
    for sentence in [*explain_marks(comparison), *comparison["caveats"]]:
        console.print(sentence, markup=False)
    print_advice(console, comparison)


def print_advice(console: Console, comparison: dict[str, Any]) -> None:
    """Print the recommendations of a comparison."""
    for advice in comparison["recommendations"]:
        console.print(
            Text()
            .append(advice["goal"], "bold")
            .append(f": {advice['choice']}. {advice['because']}")
        )


def position_table(rows: Sequence[dict[str, Any]]) -> Table | None:
    """Return the tokens per forward of each drafter and tree by position in the text; None
    without long texts.
    """
    columns = list_groups(
        TEXT_POSITION_COLUMNS, [entry for row in rows for entry in row["systems"]]
    )
    if not columns:
        return None
    table = Table(
        title="tokens per forward by position in the text, in tokens",
        box=SIMPLE_HEAD,
        show_edge=False,
    )
    for title in ("drafter", "tree"):
        table.add_column(title, overflow="fold")
    for column in columns:
        table.add_column(column.title.removeprefix("text "), justify="right", no_wrap=True)
    for row in rows:
        for number, entry in enumerate(row["systems"]):
            cells = [f"{column.cell(entry)}\n{column.interval_cell(entry)}" for column in columns]
            table.add_row("" if number else row["label"], entry["label"], *cells)
    return table


def explain_marks(comparison: dict[str, Any]) -> Iterator[str]:
    """Say what columns and marks mean."""
    for column in RUN_COLUMNS:
        if "terminal" in column.shown_in:
            yield f"{column.title}: {column.description}"
    yield "report.html shows predicted speedups and memory as well."
    references = {row["lossless_to"] for row in comparison["rows"]}
    if "trained target" in references:
        yield (
            "* The drafter's training changes the target: outputs are identical to those of "
            "the trained one."
        )
    if "nothing" in references:
        yield "! Lossy: the output is not the target's."
    if any(
        not (entry["speedup"] or {}).get("quotable", True)
        for row in comparison["rows"]
        for entry in row["systems"]
    ):
        yield (
            "? Not to be quoted: the machine was busy, or the speedup is above the tokens per "
            "forward."
        )


def comparison_markdown(comparison: dict[str, Any]) -> str:
    """Return the table for a README, with its setting."""
    titles = comparison_titles("markdown")
    setting = comparison["setting"]
    versions = ", ".join(
        f"{name} {setting['versions'][name]}" for name in ("torch", "transformers")
    )
    training = f"{setting['budget'] or 'finished runs'}, from {setting['data']}"
    scoring = (
        f"{setting['prompts']} prompts of at most {setting['max_new_tokens']} tokens, rule "
        f"{setting['rule']}"
    )
    commit = (setting["commit"] or "unknown")[:12]
    machine = (
        f"{setting['dtype']}, {setting['device']}, {setting['threads']} threads, {versions}, "
        f"commit {commit}"
    )
    lines = [f"`{setting['target']}`; {training}; {scoring}; {machine}:", ""]
    lines += ["| " + " | ".join(titles) + " |", "|---|---|" + "---:|" * (len(titles) - 2)]
    for row in comparison["rows"]:
        lines += [
            "| " + " | ".join(cells) + " |"
            for cells in comparison_cells(row, "markdown", "{} [{}]".format)
        ]
    for axes in comparison.get("axes", {}).values():
        lines += ["", axis_markdown(axes)]
    advice = [
        f"- {item['goal']}: **{item['choice']}**. {item['because']}"
        for item in comparison["recommendations"]
    ]
    return "\n".join(
        [*lines, "", *advice, *(f"- {sentence}" for sentence in comparison["caveats"])]
    )
