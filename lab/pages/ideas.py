"""The tables of ideas of packages/research, from the README of each one's folder and its choices.

A README has a title, a paragraph that says what the idea is, and a list of fields: Papers, Use,
Proof and others. A drafter also has Cost, which says what a draft costs, and, where docs/families
has a page of it, Page. The choices of an idea are the files of conf/ that construct its classes,
and those that Use names.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lab.pages.render import ROOT, format_table

IDEAS = ROOT / "packages" / "research" / "spectrain_research"
CONF = IDEAS / "conf"
MARKS = re.compile(r"(<!-- ideas -->\n).*?(<!-- /ideas -->)", re.DOTALL)
DRAFTING = ("recipe", "drafter")


@dataclass(frozen=True)
class Idea:
    """What the README of an idea says, and its choices as (group, name)."""

    folder: str
    title: str
    summary: str
    fields: dict[str, str]
    choices: list[tuple[str, str]]

    @property
    def drafts(self) -> bool:
        """Whether it has a drafter or a recipe of its own."""
        return any(group in DRAFTING for group, _ in self.choices)


@cache
def list_ideas() -> list[Idea]:
    """Return all ideas, by the names of their folders."""
    return [read_idea(path) for path in sorted(IDEAS.glob("*/README.md"))]


def read_idea(path: Path) -> Idea:
    """Return the idea of a README."""
    title, summary, *rest = path.read_text().strip().split("\n\n")
    items = re.findall(r"^- (\w+): (.*?)(?=^- |\Z)", "\n\n".join(rest), re.MULTILINE | re.DOTALL)
    fields = {name: " ".join(text.split()) for name, text in items}
    return Idea(
        path.parent.name,
        title.removeprefix("# "),
        " ".join(summary.split()),
        fields,
        list_choices(path.parent.name, fields.get("Use", "")),
    )


def list_choices(folder: str, use: str) -> list[tuple[str, str]]:
    """Return the recipes, then the other choices, of an idea."""
    named = set(re.findall(r"\b([a-z]+)=([a-z0-9_]+)", use))
    constructed = re.compile(rf"_target_: spectrain_research\.{folder}\.")
    choices = [
        (path.parent.name, path.stem)
        for path in sorted(CONF.glob("*/*.yaml"))
        if (path.parent.name, path.stem) in named or constructed.search(path.read_text())
    ]
    return sorted(choices, key=lambda choice: (choice[0] != "recipe", choice))


def name_choices(choices: list[tuple[str, str]]) -> str:
    """Return choices as code: recipes by their names, and what no recipe of that name implies."""
    recipes = {name for group, name in choices if group == "recipe"}
    return ", ".join(
        f"`{name}`" if group == "recipe" else f"`{group}={name}`"
        for group, name in choices
        if group == "recipe" or name not in recipes
    )


def package_table() -> str:
    """Return the table of all ideas for the package's README."""
    rows = (
        [
            f"[{idea.title}](spectrain_research/{idea.folder}/README.md)",
            name_choices(idea.choices),
            idea.summary,
            idea.fields["Papers"].rstrip("."),
        ]
        for idea in list_ideas()
    )
    return format_table(("idea", "recipe or choice", "what it is", "papers"), rows)


def drafters_table() -> str:
    """Return the table of the ideas that draft, for docs/families/index.md."""
    rows = []
    for idea in filter(lambda idea: idea.drafts, list_ideas()):
        page = idea.fields.get("Page")
        title = idea.title if page is None else f"[{idea.title}]({Path(page.strip('`.')).name})"
        choices = [choice for choice in idea.choices if choice[0] in DRAFTING]
        rows.append(
            [name_choices(choices), f"{title}: {idea.summary}", idea.fields["Cost"].rstrip(".")]
        )
    return format_table(("recipe or choice", "method", "cost of a draft"), rows)


def render_idea_pages() -> dict[Path, str]:
    """Return the text of the pages that list ideas."""
    tables = {
        ROOT / "packages" / "research" / "README.md": package_table(),
        ROOT / "docs" / "families" / "index.md": drafters_table(),
    }
    return {
        path: MARKS.sub(rf"\g<1>{escape(table)}\n\g<2>", path.read_text())
        for path, table in tables.items()
    }


def escape(text: str) -> str:
    """Return a text as it stands in the replacement of a regular expression."""
    return text.replace("\\", r"\\")
