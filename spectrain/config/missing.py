"""Sentences about choices, settings and formats that a package holds which is not installed.

packages.json lists the names of each package; `python -m scripts.list_package_names` writes it from
the packages of the repository.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

NAMES = Path(__file__).with_name("packages.json")


@cache
def read_package_names() -> Mapping[str, Mapping[str, list[str]]]:
    """Return package -> group -> names: the choices of the group, its settings as GROUP.KEY, and
    the values of format.
    """
    names: dict[str, dict[str, list[str]]] = json.loads(NAMES.read_text())
    return names


def find_missing_package(group: str, name: str) -> str | None:
    """Return the package that has a name of a group, in the same words as packages.json; None if
    none has it.
    """
    return next(
        (
            package
            for package, groups in read_package_names().items()
            if name in groups.get(group, ())
        ),
        None,
    )


def explain_missing(group: str, name: str, shown: str | None = None) -> str | None:
    """Return the sentence that says how to install what has a name, which is shown as `group=name`
    or otherwise; None if no package has it."""
    package = find_missing_package(group, name)
    if package is None:
        return None
    folder = f"packages/{package.removeprefix('spectrain-')}"
    return (
        f"{shown or f'{group}={name}'} is in {package}: pip install {package} (in a checkout: "
        f"pip install {folder})"
    )
