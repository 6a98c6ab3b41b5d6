"""Rows of the table of layouts, and what installed packages add to it. All is named as text, so
that nothing is imported for a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from spectrain.config.installed import load_entry_points

SCORE_WITHOUT_ENGINE = "score it with spectrain eval, which needs no engine"


@dataclass(frozen=True)
class TableRow:
    """A layout of the table."""

    # Module of this package, and the name of the layout in it.
    path: str
    # The values of `format` that write it; empty for a layout that is only read.
    formats: tuple[str, ...]
    # The choices of `drafter` that it can hold.
    families: tuple[str, ...]
    # Suffix of its weights; a layout with another one has a container of its own.
    suffix: str = ".safetensors"
    # Of a row of an installed package, whose path is absolute: the row of this table before
    # which it stands.
    before: str = ""


@dataclass(frozen=True)
class EngineSupport:
    """A program that reads a layout."""

    program: str  # a key of engine_support.PROGRAMS
    layout: str  # the path of the layout's row
    # Names of the classes that read the drafter, as the program's registry has them; empty where it
    # looks up none, or that of the target.
    classes: tuple[str, ...] = ()
    # The first and the last version that reads it, where another one does not.
    since: str = ""
    until: str = ""
    note: str = ""  # what else must be so, as in "on a GPU"
    # Choices of `quantize` whose weights it reads in this layout; with "fc", also those of the
    # layer that fuses the target's states.
    quantized: tuple[str, ...] = ()


@dataclass(frozen=True)
class TargetFormat:
    """A format in which a target can be written for its engine."""

    title: str
    # Import path of the function that writes a target into a folder and returns the file: of a
    # TargetFiles, the folder, the type of the weights (None: the format's default) and the
    # interpreter of the engine's environment (None: the usual one).
    path: str


@dataclass(frozen=True)
class WeightlessExport:
    """How drafters without weights are written for an engine, without a run."""

    drafters: tuple[str, ...]  # choices of `drafter`
    format: str  # the value of `format`
    title: str  # the engine's name in texts
    # Import path of the function that writes files and a card: of the drafter's settings, the
    # target's TargetFiles, an existing folder, and the folder's name in the card.
    path: str


@dataclass(frozen=True)
class LayoutPackage:
    """What an installed package adds to exports, as text, so that nothing is imported to list the
    formats.

    Its entry point is in the group `spectrain.export`.
    """

    rows: tuple[TableRow, ...] = ()
    # Path of a row of the core's table -> further choices of `drafter` that its layout holds:
    # drafters that differ from the row's own in their training alone.
    families: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Which programs read these layouts, and the titles of programs that read no other ones.
    support: tuple[EngineSupport, ...] = ()
    programs: Mapping[str, str] = field(default_factory=dict)
    # Values of `format` in which a target can be written.
    target_formats: Mapping[str, TargetFormat] = field(default_factory=dict)
    weightless: tuple[WeightlessExport, ...] = ()
    # Choice of `drafter` -> its name in a model card, of all that spectrain's own layout holds.
    titles: Mapping[str, str] = field(default_factory=dict)
    # Choice of `drafter` -> why no engine can serve it from an export, and what to do instead.
    serving_hints: Mapping[str, str] = field(default_factory=dict)
    # Choice of `drafter` -> import path of the function that returns what a description may omit.
    shape_readers: Mapping[str, str] = field(default_factory=dict)
    # Part of a tensor's name -> what it is, for the message of a layout of block drafters that
    # lacks it.
    foreign_parts: Mapping[str, str] = field(default_factory=dict)


def list_packages() -> list[LayoutPackage]:
    """Return what installed packages add to exports."""
    return [*load_entry_points("export")]


def add_families(table: tuple[TableRow, ...]) -> tuple[TableRow, ...]:
    """Return the table with the families that installed packages add to its rows."""
    added: dict[str, list[str]] = {row.path: [] for row in table}
    for package in list_packages():
        for path, families in package.families.items():
            assert path in added, f"no row of the table has the path {path}"
            added[path] += families
    return tuple(replace(row, families=(*row.families, *added[row.path])) for row in table)


def insert_rows(table: tuple[TableRow, ...], rows: Iterable[TableRow]) -> tuple[TableRow, ...]:
    """Return the table with the rows of installed packages at their places."""
    rows = [*rows]
    inserted: list[TableRow] = []
    for row in table:
        inserted += [other for other in rows if other.before == row.path]
        inserted.append(row)
    missing = [row.path for row in rows if row not in inserted]
    assert not missing, f"no row of the table is named by `before` of {missing}"
    return tuple(inserted)
