"""The tables that `spectrain eval` and `spectrain compare` print, and the Markdown table of a
comparison.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spectrain.eval.axes.tables import axis_markdown, print_axis
from spectrain.eval.columns import (
    RUN_COLUMNS,
    SYSTEM_COLUMNS,
    TEXT_POSITION_COLUMNS,
    Column,
    ComparisonTable,
    autoregressive_entries,
    label_row,
    list_groups,
    list_systems,
)
from spectrain.eval.extensions import EvalExtension
from spectrain.eval.headline import count_prompts, describe_headline
from spectrain.eval.notes import explain_numbers, list_caveats, list_warnings
from spectrain.output.console import make_console
from spectrain.output.verbosity import shows_notes

WIDTH = 100  # characters of a printed line
# after a run's name: lossless to what
MARKS = {"target": "", "trained target": "*", "nothing": "!"}


def open_console() -> Console:
    """Return a console of at most `WIDTH` characters."""
    return make_console(
        width=min(WIDTH, make_console().width) if make_console().is_terminal else WIDTH
    )


# One evaluation


def print_table(summary: dict[str, Any], extensions: Sequence[EvalExtension] = ()) -> None:
    """Print the headline, all systems, what extensions add, and the warnings; with --notes also
    the sentences that explain the numbers.
    """
    console = open_console()
    first, *others = describe_headline(summary) or [""]
    if first:
        console.print(first, style="bold", markup=False, highlight=False)
    for sentence in others:
        console.print(sentence, markup=False, highlight=False)
    console.print(system_table(summary, console.width))
    for extension in extensions:
        extension.print_results(console, summary)
    for sentence in list_warnings(summary):
        console.print(sentence, markup=False)
    if shows_notes():
        for sentence in (*explain_numbers(summary), *list_caveats(summary)):
            console.print(sentence, markup=False)


def system_table(summary: dict[str, Any], width: int) -> Table:
    """Return a table with a row for each system; on a narrow terminal some columns are
    left out, so that names need no three lines.
    """
    setting = summary["setting"]
    precision = f", drafter in {setting['drafter_dtype']}" if setting.get("drafter_dtype") else ""
    table = Table(
        title=(
            f"{setting['recipe']} on {setting['target']}: {count_prompts(setting['prompts'])}, "
            f"{setting['max_new_tokens']} tokens"
        )
        + precision,
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=0,
    )
    is_narrow = width < WIDTH
    columns = [column for column in SYSTEM_COLUMNS if column.is_in_narrow or not is_narrow]
    table.add_column("", overflow="fold")
    for column in columns:
        for title in (
            column.title.replace(" per ", "\nper\n" if is_narrow else " per\n"),
            *(["95 %"] if column.interval else []),
        ):
            table.add_column(title, justify="right", no_wrap=True)
    for entry in (*autoregressive_entries(summary), *list_systems(summary).values()):
        cells = [
            text
            for column in columns
            for text in (
                column.cell(entry),
                *([column.interval_cell(entry)] if column.interval else []),
            )
        ]
        table.add_row(label_row(entry), *cells)
    return table


def print_answer(drafts: Sequence[dict[str, Any]]) -> None:
    """Print the longest of the recorded answers, with the tokens that the drafter wrote in colour
    or, without colours, in brackets; the target's own tokens are as they are.
    """
    answers = [line for line in drafts if line.get("rounds")]
    if not answers:
        return
    console = open_console()
    answer = max(answers, key=lambda line: len(line["pieces"]))
    text = Text()
    num_drafted = 0
    has_colours = console.color_system is not None
    for pieces, is_drafted in split_by_author(answer):
        if not is_drafted:
            text.append("".join(pieces))
            continue
        num_drafted += len(pieces)
        written = "".join(pieces)
        text.append(written if has_colours else f"[{written}]", "green" if has_colours else "")
    how = "in green" if has_colours else "in brackets"
    console.print(
        f"One answer; the drafter wrote what is {how}, {num_drafted} of "
        f"{len(answer['pieces'])} tokens, and the target the rest:",
        markup=False,
        highlight=False,
    )
    console.print(text, highlight=False)


def split_by_author(answer: Mapping[str, Any]) -> Iterator[tuple[list[str], bool]]:
    """Yield the pieces of an answer's tokens in turn: those of the target, and those of the drafter
    that were accepted.
    """
    pieces = answer["pieces"]
    yield pieces[:1], False
    start = 1
    for round in answer["rounds"]:
        # The last node of a path that was cut short emitted nothing.
        accepted = min(len(round["kept"]), round["emitted"])
        if accepted:
            yield pieces[start : start + accepted], True
        yield pieces[start + accepted : start + round["emitted"]], False
        start += round["emitted"]
    yield pieces[start:], False


# Comparison


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
