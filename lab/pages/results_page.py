"""A page of docs/results/ that shows files of lab/results/."""

import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lab.pages.results_tables import describe_setting

RESULTS = Path(__file__).parents[2] / "lab" / "results"


@dataclass(frozen=True)
class ResultsPage:
    """A page: its title, what was compared, the files of results, the command that wrote them,
    and the tables.
    """

    title: str
    introduction: str
    files: tuple[str, ...]
    command: str
    make_tables: Callable[..., str]
    remarks: str = ""

    def render(self) -> str:
        """Return the markdown of the page."""
        results = [json.loads((RESULTS / name).read_text()) for name in self.files]
        sources = " and ".join(f"`lab/results/{name}`" for name in self.files)
        first = (
            f"Generated from {sources} by `lab/pages/make_pages.py`. The command that measured it:"
        )
        introduction = fill_paragraphs(self.introduction)
        remarks = fill_paragraphs(self.remarks)
        parts = [
            f"# {self.title}",
            introduction,
            first,
            f"```sh\n{self.command}\n```",
            describe_setting(results[0]),
        ]
        return "\n\n".join(filter(None, [*parts, self.make_tables(*results), remarks])) + "\n"


def fill_paragraphs(text: str) -> str:
    """Wrap each paragraph of a text at 128 characters."""
    fill = partial(textwrap.fill, width=128, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join(fill(paragraph) for paragraph in text.split("\n\n"))
