"""The tables of docs/serving.md: which programs, in which versions, read which format, and what a
schedule of draft tokens gains under load.
"""

import json
import re
from pathlib import Path

from lab.pages.render import ROOT, format_table
from spectrain.export.engine_support import PROGRAMS, READ_VERSIONS, describe_readers
from spectrain.export.layouts import FAMILY_TITLES, LAYOUTS, load_layout

PAGE = ROOT / "docs" / "serving.md"
# Key of a server's counts -> its column.
COUNTED = {"rounds": "rounds with drafts", "drafted": "drafted", "accepted": "accepted"}


def render_serving_page() -> dict[Path, str]:
    """Return the page with its tables written again."""
    page = PAGE.read_text()
    for name, text in (
        ("engines", f"{engines_table()}\n\n{versions_sentence()}\n"),
        ("schedules", f"{schedules_table()}\n"),
        ("schedule in vLLM", f"{engine_schedule_table()}\n"),
    ):
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        page = marks.sub(rf"\g<1>{text}\g<2>", page)
    return {PAGE: page}


def schedules_table() -> str:
    """Return the time per token of a fixed number of draft tokens, and of none, over that of the
    schedule, by load.
    """
    result = json.loads((ROOT / "lab" / "results" / "schedules.json").read_text())
    rows = []
    for name, row in result["rows"].items():
        lengths = ", ".join(
            f"{length} for {first if first == last else f'{first} to {last}'}"
            for first, last, length in row["ranges"]
        )
        gains = [
            f"{fixed:.2f} / {never:.2f}"
            for fixed, never in zip(row["over_fixed"], row["over_never"], strict=True)
        ]
        rows.append([name.split(",")[0], lengths, *gains])
    loads = [f"load {load:.0%}" for load in result["loads"]]
    return format_table(["drafter", "draft tokens by texts", *loads], rows)


def engine_schedule_table() -> str:
    """Return what vLLM did with a schedule and with a fixed number of draft tokens, by requests at
    once.
    """
    result = json.loads((ROOT / "lab" / "results" / "engine-schedule.json").read_text())
    rows = []
    for level in result["levels"]:
        both = [level["servers"][name] for name in ("fixed", "schedule")]
        seconds = (", ".join(f"{value:.1f}" for value in each["seconds"]) for each in both)
        rows.append(
            [
                str(level["requests_at_once"]),
                *(" / ".join(f"{each[key]:,}" for each in both) for key in COUNTED),
                " / ".join(seconds),
            ]
        )
    counts = [f"{title}, fixed / schedule" for title in COUNTED.values()]
    return format_table(
        ["requests at once", *counts, "seconds of each repeat, fixed / schedule"], rows
    )


def engines_table() -> str:
    """Return a row for every layout that an export can have, those of a family together."""
    rows = [row for row in LAYOUTS if row.formats and row.formats != ("spectrain",)]
    order = [*FAMILY_TITLES]
    rows.sort(key=lambda row: order.index(row.families[0]))
    cells = []
    for row in rows:
        titles = ", ".join(FAMILY_TITLES[family] for family in row.families)
        formats = ", ".join(f"`{name}`" for name in row.formats)
        layout = load_layout(row)
        cells.append([titles, formats, layout.title, describe_readers(layout)])
    return format_table(["drafter", "format", "layout", "read by"], cells)


def versions_sentence() -> str:
    """Return which versions the table is true of."""
    versions = ", ".join(
        f"{PROGRAMS[program]} {' and '.join(versions)}"
        for program, versions in READ_VERSIONS.items()
    )
    return f"The table was taken from the code of these versions: {versions}."
