"""The table that `spectrain compare` prints, and the one for a page in Markdown."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

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
    list_short_labels,
)
from spectrain.eval.headline import count_prompts
from spectrain.eval.report import fits_width, open_console
from spectrain_studies.axes.tables import axis_markdown, print_axis

LEAST_COLUMNS = 4  # drafter, tree, tokens per forward, speedup
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
    entries = run["systems"]
    labels = list_short_labels(entries) if table == "terminal" else [*map(label_row, entries)]
    for number, (entry, label) in enumerate(zip(entries, labels)):
        values = [(column.cell(entry), column.interval_cell(entry)) for column in systems]
        yield [
            run["label"] + MARKS[run["lossless_to"]] if number == 0 else "",
            label,
            *(join(value, interval) if interval else value for value, interval in values),
            *(column.cell(run) if number == 0 else "" for column in runs),
        ]


def print_comparison(comparison: dict[str, Any]) -> None:
    """Print one line for each drafter and tree, then which of them to take."""
    console = open_console()
    table, titles = comparison_table(comparison, console.width)
    console.print(table)
    if (positions := position_table(comparison["rows"])) is not None:
        console.print(positions)
    for axes in comparison.get("axes", {}).values():
        print_axis(console, axes)
    for sentence in [*explain_marks(comparison, titles), *comparison["caveats"]]:
        console.print(sentence, markup=False)
    print_advice(console, comparison)


def comparison_table(comparison: dict[str, Any], width: int) -> tuple[Table, list[str]]:
    """Return the table of a comparison and the titles of its columns: those that have values, and
    from the last on without those beside which names would wrap in this many characters.
    """
    titles = comparison_titles("terminal")
    rows = [
        # A row has two lines anyway, so tokens and seconds of a training stand in one each.
        [*cells[:-1], cells[-1].replace(", ", ",\n")]
        for run in comparison["rows"]
        for cells in comparison_cells(run, "terminal", "{}\n{}".format)
    ]
    shown = [at for at in range(len(titles)) if at < LEAST_COLUMNS or any(row[at] for row in rows)]
    while True:
        table = make_comparison_table(
            describe_setting(comparison["setting"]),
            [titles[at] for at in shown],
            [[row[at] for at in shown] for row in rows],
        )
        if len(shown) == LEAST_COLUMNS or fits_width(table, width):
            return table, [titles[at] for at in shown]
        shown.pop()


def describe_setting(setting: dict[str, Any]) -> str:
    """Say what was compared, on which machine."""
    budget = f", {setting['budget']} each" if setting.get("budget") else ""
    return (
        f"{setting['target']}: {count_prompts(setting['prompts'])}, {setting['max_new_tokens']} "
        f"tokens{budget}; {setting['device']}, {setting['dtype']}"
    )


def make_comparison_table(title: str, titles: Sequence[str], rows: Sequence[list[str]]) -> Table:
    """Return a table of these columns, the first two of which are names."""
    table = Table(
        title=title, box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for number, name in enumerate(titles):
        lines = (
            name.replace(" per ", " per\n")
            .replace("batched ", "batched\n")
            .replace("trained ", "trained\n")
        )
        folds = number < 2
        justify: Literal["left", "right"] = "left" if folds else "right"
        table.add_column(lines, justify=justify, overflow="fold", no_wrap=not folds)
    for cells in rows:
        table.add_row(*cells)
    return table


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


def explain_marks(comparison: dict[str, Any], titles: Sequence[str]) -> Iterator[str]:
    """Say what columns with these titles and marks mean."""
    for column in RUN_COLUMNS:
        if column.title in titles:
            yield f"{column.title}: {column.description}"
    yield "report.html shows every column, predicted speedups and memory too."
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
        f"{count_prompts(setting['prompts'])} of at most {setting['max_new_tokens']} tokens, rule "
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
