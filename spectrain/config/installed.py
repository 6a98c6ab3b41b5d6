"""What installed packages add to this one, found by their entry points: folders of choices,
settings, layouts and rules.

A package declares entry points in its pyproject.toml; docs/adding.md lists their groups. Nothing
here names a package.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

PREFIX = "spectrain."


@cache
def read_entry_points() -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return group -> entry points of all installed packages, in the order of their names. They
    are read once.
    """
    installed = entry_points()
    return {
        group: tuple(sorted(installed.select(group=group), key=attrgetter("name", "value")))
        for group in installed.groups
        if group.startswith(PREFIX)
    }


def list_entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group, such as conf for spectrain.conf."""
    return read_entry_points().get(f"{PREFIX}{group}", ())


@cache
def load_entry_points(group: str) -> tuple[Any, ...]:
    """Import the objects that the entry points of a group name."""
    return tuple(entry.load() for entry in list_entry_points(group))


@cache
def find_package_folder(package: str) -> Path | None:
    """Return the folder of a top-level package without importing it; None if it is not
    installed.
    """
    spec = find_spec(package)
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(locations[0]) if locations else None


@cache
def list_conf_modules() -> tuple[str, ...]:
    """Return the import paths of the folders of choices of installed packages."""
    return tuple(entry.value for entry in list_entry_points("conf"))


@cache
def list_conf_folders() -> tuple[Path, ...]:
    """Return the folders of choices of installed packages."""
    folders = []
    for module in list_conf_modules():
        package, *inner = module.split(".")
        folder = find_package_folder(package)
        folders += [] if folder is None else [folder.joinpath(*inner)]
    return tuple(folders)


@cache
def list_package_roots() -> tuple[Path, ...]:
    """Return the folders in which the installed packages of choices lie, for whoever parses
    their sources.
    """
    packages = dict.fromkeys(module.partition(".")[0] for module in list_conf_modules())
    return tuple(
        folder.parent
        for package in packages
        if (folder := find_package_folder(package)) is not None
    )
