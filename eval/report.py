"""The table that `spectrain eval` prints, and an answer with its drafted tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spectrain.eval.columns import (
    SYSTEM_COLUMNS,
    Column,
    autoregressive_entries,
    list_short_labels,
    list_systems,
)
from spectrain.eval.extensions import EvalExtension
from spectrain.eval.headline import count_prompts, describe_headline
from spectrain.eval.notes import explain_numbers, list_caveats, list_findings, list_warnings
from spectrain.output.console import make_console
from spectrain.output.verbosity import shows_notes

WIDTH = 100  # characters of a printed line
# Characters of a name in a table: longer ones wrap, and one is never narrower.
MAX_NAME = 28
MIN_NAME = 16


def open_console() -> Console:
    """Return a console of at most `WIDTH` characters."""
    return make_console(
        width=min(WIDTH, make_console().width) if make_console().is_terminal else WIDTH
    )


def print_table(summary: dict[str, Any], extensions: Sequence[EvalExtension] = ()) -> None:
    """Print the headline, all systems, what extensions add, findings and warnings; with --notes
    also the sentences that explain the numbers.
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
    for sentence in (*list_findings(summary), *list_warnings(summary)):
        console.print(sentence, markup=False)
    if shows_notes():
        for sentence in (*explain_numbers(summary), *list_caveats(summary)):
            console.print(sentence, markup=False)


def system_table(summary: dict[str, Any], width: int) -> Table:
    """Return a table with a row for each system. Where names would wrap in this many characters,
    optional columns are left out, then the intervals.
    """
    columns = [*SYSTEM_COLUMNS]
    while not fits_width(table := make_system_table(summary, columns), width):
        last = max(columns, key=lambda column: column.optional)
        if not last.optional:
            columns = [replace(column, interval=None) for column in columns]
            return make_system_table(summary, columns)
        columns.remove(last)
    return table


def fits_width(table: Table, width: int) -> bool:
    """Tell whether a table needs no more characters than this."""
    return make_console(width=10 * WIDTH).measure(table).maximum <= width


def make_system_table(summary: dict[str, Any], columns: Sequence[Column]) -> Table:
    """Return a table of these columns, whose names need at most `MAX_NAME` characters."""
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
    entries = [*autoregressive_entries(summary), *list_systems(summary).values()]
    labels = list_short_labels(entries)
    has_shares = any(label.endswith("% drafted") for label in labels)
    longest = max((len(label) for label in labels if len(label) <= MAX_NAME), default=MAX_NAME)
    table.add_column(
        "% drafted: share of rounds\nin which it drafted" if has_shares else "",
        overflow="fold",
        min_width=min(longest, MIN_NAME),
        max_width=longest,
    )
    for column in columns:
        for title in (
            column.title.replace(" per ", "\nper\n"),
            *(["95 %"] if column.interval else []),
        ):
            table.add_column(title, justify="right", no_wrap=True)
    for label, entry in zip(labels, entries):
        cells = [
            text
            for column in columns
            for text in (
                column.cell(entry),
                *([column.interval_cell(entry)] if column.interval else []),
            )
        ]
        table.add_row(label, *cells)
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
