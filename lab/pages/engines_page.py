"""The table of docs/serving.md: which programs, in which versions, read which format."""

import re
from pathlib import Path

from lab.pages.render import ROOT, format_table
from spectrain.export.engine_support import PROGRAMS, READ_VERSIONS, describe_readers
from spectrain.export.layouts import FAMILY_TITLES, LAYOUTS, load_layout

PAGE = ROOT / "docs" / "serving.md"
MARKS = re.compile(r"(<!-- engines -->\n).*?(<!-- /engines -->)", re.DOTALL)


def render_serving_page() -> dict[Path, str]:
    """Return the page with its table written again."""
    text = f"{engines_table()}\n\n{versions_sentence()}\n"
    return {PAGE: MARKS.sub(lambda match: match[1] + text + match[2], PAGE.read_text())}


def engines_table() -> str:
    """Return a row for every layout that an export can have, those of a family together."""
    rows = [row for row in LAYOUTS if row.formats and row.formats != "spectrain"]
    order = [*FAMILY_TITLES]
    rows.sort(key=lambda row: order.index(row.families.split()[0]))
    cells = []
    for row in rows:
        titles = ", ".join(FAMILY_TITLES[family] for family in row.families.split())
        formats = ", ".join(f"`{name}`" for name in row.formats.split())
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
