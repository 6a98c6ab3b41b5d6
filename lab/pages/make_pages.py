"""Write what docs/ shows of lab/results, the tables of ideas, and that of engines.

    python -m lab.pages.make_pages

A measured section of docs/results/ lies between the marks `<!-- measured: NAME -->` and
`<!-- /measured -->`; `measurements.yaml` declares it. The prose around it is written by hand. A
test compares the committed pages with what this writes.
"""

from pathlib import Path

from lab.pages.engines_page import render_serving_page
from lab.pages.ideas import render_idea_pages
from lab.pages.render import ROOT, fill_page, load_measurements
from lab.pages.systems_page import render_systems_page
from spectrain.files import write_text

FOLDER = ROOT / "docs" / "results"


def render_result_pages() -> dict[Path, str]:
    """Return the text of every page that shows measured results, or lists ideas or engines."""
    measurements = load_measurements()
    pages = {
        path: fill_page(path.read_text(), measurements) for path in sorted(FOLDER.glob("*.md"))
    }
    systems = {ROOT / "docs" / "systems.md": render_systems_page()}
    return {**pages, **systems, **render_idea_pages(), **render_serving_page()}


def main() -> None:
    for path, text in render_result_pages().items():
        write_text(path, text)


if __name__ == "__main__":
    main()
