"""`spectrain runs`: a table of run folders. It reads small files and imports nothing heavy."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spectrain.config.plain_files import read_json_object, read_yaml
from spectrain.errors import UserError, suggest_nearest
from spectrain.output.verbosity import OUTPUT_FLAGS, print_json
from spectrain.runs.folder import find_drafter_directory

RUN_FILES = ("config.yaml", "provenance.json", "metrics.jsonl", "checkpoints", "drafter")
# A comparison, and a sweep in it, hold run folders.
MAX_DEPTH = 3
# Bytes at the end of metrics.jsonl that surely hold a whole line.
TAIL_BYTES = 65_536
MAX_TEXT = 30


@dataclass
class RunRow:
    """What the table says of one run folder; None stands for what its files do not say."""

    run: str
    recipe: str | None = None
    target: str | None = None
    # Tokens of the batches that were trained on.
    tokens: int | None = None
    # Tokens per forward of the drafter, the target's own token included.
    acceptance: float | None = None
    # Ratio to plain decoding, its 95 % interval, and why it is not to be quoted.
    speedup: float | None = None
    speedup_interval: list[float] | None = None
    quotable: bool | None = None
    reason: str | None = None
    # When the training began, in ISO form.
    date: str | None = None
    # "scored", "trained", "unfinished", or "broken: " and what is wrong.
    state: str = "unfinished"


SORT_KEYS = ("run", "recipe", "target", "tokens", "acceptance", "speedup", "date", "state")
LARGEST_FIRST = ("tokens", "acceptance", "speedup", "date")
LEFT_OUT = ("date", "recipe", "target", "tokens")
"""Columns that a table without room leaves out, the first one first."""


def runs_command(words: list[str]) -> None:
    """Print the table of the run folders in a folder, or with --json a list of objects."""
    folders: list[str] = []
    sort_key = "date"
    for word in words:
        key, equals, value = word.partition("=")
        if key == "sort" and equals:
            sort_key = value
        elif word.startswith("-"):
            raise UserError(
                f"runs {word}: there is no such flag; {suggest_nearest(word, OUTPUT_FLAGS)}"
            )
        elif equals and key.isidentifier() and not Path(word).exists():
            raise UserError(
                f"{key}: runs has no such setting; write sort=COLUMN, or the folder that holds runs"
            )
        else:
            folders.append(word)
    if sort_key not in SORT_KEYS:
        raise UserError(
            f"sort={sort_key}: there is no such column; {suggest_nearest(sort_key, SORT_KEYS)}"
        )
    if len(folders) > 1:
        raise UserError(f"runs {' '.join(folders)}: give one folder that holds runs")
    folder = Path(*folders or ["runs"])
    if not folder.is_dir():
        raise UserError(f"runs {folder}: there is no such folder; give one that holds run folders")
    rows = sort_rows([read_run_row(path) for path in find_run_folders(folder)], sort_key)
    print_json([asdict(row) for row in rows])
    if rows:
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print("\n".join(format_table(rows, columns)))
    else:
        print(f"{folder} holds no run folder; spectrain train recipe=eagle3 makes one")


def find_run_folders(folder: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Yield the run folders in a folder, or the folder itself where it is one; links are not
    followed.
    """
    if any((folder / name).exists() for name in RUN_FILES):
        yield folder
        return
    try:
        children = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return
    for path in children:
        if depth and path.is_dir() and not path.is_symlink():
            yield from find_run_folders(path, depth - 1)


def read_run_row(folder: Path) -> RunRow:
    """Return the row of a run folder; a file that cannot be read makes it a broken one, with what
    the other files say.
    """
    row = RunRow(folder.as_posix())
    faults = []
    for read in (read_state, read_config, read_provenance, read_progress, read_score):
        try:
            read(folder, row)
        except UserError as error:
            faults.append(str(error).removeprefix(f"{folder}/"))
        except (AttributeError, KeyError, OSError, OverflowError, TypeError, ValueError) as error:
            what = read.__name__.removeprefix("read_")
            faults.append(f"its {what} has another form ({type(error).__name__})")
    if faults:
        row.state = f"broken: {faults[0]}"
    return row


def read_state(folder: Path, row: RunRow) -> None:
    if find_drafter_directory(folder) is not None:
        row.state = "trained"


def read_config(folder: Path, row: RunRow) -> None:
    path = folder / "config.yaml"
    if not path.exists():
        raise UserError(f"{path} is missing")
    config = read_yaml(path)
    if not isinstance(config, dict):
        raise UserError(f"{path}: it holds no settings")
    drafter = config.get("drafter") or {}
    target = config.get("target") or {}
    row.recipe = read_name(config.get("recipe_name") or drafter.get("choice"))
    row.target = read_name(target.get("model") or target.get("choice"))


def read_name(value: Any) -> str | None:
    """Return a name from a file on one line."""
    return None if value is None else " ".join(str(value).split())


def read_provenance(folder: Path, row: RunRow) -> None:
    path = folder / "provenance.json"
    if path.exists():
        row.date = read_name(read_json_object(path).get("date"))


def read_progress(folder: Path, row: RunRow) -> None:
    """Read the tokens of the last whole line of metrics.jsonl; a killed run may have cut the
    last one.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        try:
            metrics = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(metrics, dict) and "tokens" in metrics:
            row.tokens = int(metrics["tokens"])
            return
    if lines:
        raise UserError(f"{path}: no line of it can be read")


def read_score(folder: Path, row: RunRow) -> None:
    """Read the drafter's score on the held-out prompts, or else the first of another name in this
    project's own engine.
    """
    paths = sorted(
        folder.glob("eval/*/summary.json"), key=lambda path: (path.parent.name != "heldout", path)
    )
    for path in paths:
        summary = read_json_object(path)
        # Servers have scores of their own.
        if "server" in summary:
            continue
        acceptance = float(summary["acceptance_length"]["pooled"])
        speedup = summary.get("speedup") or {}
        ratio = speedup.get("ratio")
        interval = speedup.get("ci95")
        row.speedup = None if ratio is None else float(ratio)
        if interval is not None:
            low, high = map(float, interval)
            row.speedup_interval = [low, high]
        row.quotable = None if ratio is None else bool(speedup.get("quotable", True))
        row.reason = read_name(speedup.get("reason"))
        row.acceptance = acceptance
        row.state = "scored"
        return


def sort_rows(rows: Sequence[RunRow], key: str) -> list[RunRow]:
    """Return rows by a column: numbers and dates from the largest, names by the alphabet, rows
    without a value last.
    """
    known = [row for row in rows if getattr(row, key) is not None]
    rest = [row for row in rows if getattr(row, key) is None]
    ordered = sorted(known, key=lambda row: getattr(row, key), reverse=key in LARGEST_FIRST)
    return [*ordered, *rest]


def format_table(rows: Sequence[RunRow], max_width: int | None = None) -> list[str]:
    """Return the lines of the table, of at most this many characters where leaving out columns
    achieves that, and those that explain it.
    """
    head = ["run", "recipe", "target", "tokens", "accept", "speedup", "date", "state"]
    cells = [head, *(format_cells(row) for row in rows)]
    left_out = []
    for name in LEFT_OUT:
        # What is wrong with a broken run may be long.
        states = [[*line[:-1], line[-1].partition(":")[0]] for line in cells]
        if max_width is None or max(map(len, join_cells(states))) <= max_width:
            break
        column = cells[0].index(name)
        cells = [line[:column] + line[column + 1 :] for line in cells]
        left_out.append(name)
    lines = join_cells(cells)
    marks = {speedup_mark(row) for row in rows}
    notes = []
    if left_out:
        notes.append(f"a wider terminal also shows {', '.join(left_out)}")
    if any(row.acceptance is not None for row in rows):
        notes.append("accept: tokens per forward of the target")
    if "?" in marks:
        notes.append("?: a speedup that is not to be quoted (--json says why)")
    if "~" in marks:
        notes.append("~: a speedup whose 95 % interval includes 1, or is not known")
    return [*lines, *(f"  {note}" for note in notes)]


def join_cells(cells: Sequence[list[str]]) -> list[str]:
    """Return the lines of a table with columns of equal width; the last column is open."""
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


def format_cells(row: RunRow) -> list[str]:
    return [
        row.run,
        shorten_text(row.recipe),
        shorten_text(None if row.target is None else os.path.basename(row.target.rstrip("/"))),
        "-" if row.tokens is None else f"{row.tokens:,}",
        "-" if row.acceptance is None else f"{row.acceptance:.2f}",
        "-" if row.speedup is None else f"{row.speedup:.2f} {speedup_mark(row)}".rstrip(),
        "-" if row.date is None else row.date[:10],
        row.state,
    ]


def shorten_text(text: str | None) -> str:
    if text is None:
        return "-"
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 2]}.."


def speedup_mark(row: RunRow) -> str:
    """Return "?" for a speedup that is not to be quoted, "~" for one whose interval includes 1,
    and "" for a reliable one.
    """
    if row.speedup is None:
        return ""
    if not row.quotable:
        return "?"
    if row.speedup_interval is None:
        return "~"
    low, high = row.speedup_interval
    return "~" if low <= 1 <= high else ""
