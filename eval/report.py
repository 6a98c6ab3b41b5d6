"""The table that `spectrain eval` prints, and an answer with its drafted tokens."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spectrain.eval.columns import (
    SYSTEM_COLUMNS,
    autoregressive_entries,
    label_row,
    list_systems,
)
from spectrain.eval.extensions import EvalExtension
from spectrain.eval.headline import count_prompts, describe_headline
from spectrain.eval.notes import explain_numbers, list_caveats, list_findings, list_warnings
from spectrain.output.console import make_console
from spectrain.output.verbosity import shows_notes

WIDTH = 100  # characters of a printed line


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
