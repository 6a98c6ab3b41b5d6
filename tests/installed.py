"""Cases that the tests of installed packages add to tables of these tests."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from spectrain.config.choices import list_constructors
from spectrain.config.installed import list_conf_modules
from spectrain.export.layouts import FORMATS

ROOT = Path(__file__).parents[1]


def list_checkouts() -> list[Path]:
    """Return the folders in packages/ of the installed packages of choices. A package may be
    installed from a wheel: its tests are in this repository all the same.
    """
    packages = dict.fromkeys(module.partition(".")[0] for module in list_conf_modules())
    folders = [ROOT / "packages" / package.removeprefix("spectrain_") for package in packages]
    return [folder for folder in folders if folder.exists()]


def load_cases(module: str) -> dict[str, Any]:
    """Return name of a table -> further cases, which packages in packages/ have for a test module
    such as tests.decoding.test_captured."""
    cases: dict[str, Any] = {}
    folder, _, name = module.rpartition(".")
    for root in list_checkouts():
        package = ".".join(root.relative_to(ROOT).parts)
        path = f"{package}.{folder}.{name.removeprefix('test_')}_cases"
        if (root.joinpath(*folder.split("."), f"{name.removeprefix('test_')}_cases.py")).exists():
            assert find_spec(path) is not None, f"{path} is found from the root of the repository"
            for table, more in import_module(path).CASES.items():
                if table not in cases:
                    cases[table] = more
                elif isinstance(more, dict):
                    cases[table] = cases[table] | more
                else:
                    cases[table] = cases[table] + more
    return cases


def select_formats(*formats: str) -> list[str]:
    """Return those of these values of `format` that this package or an installed one has."""
    return [name for name in formats if name in FORMATS]


def select_installed(group: str, choices: Any) -> Any:
    """Return those of a table's choices, or of a list of choices, that this package or an
    installed one has.
    """
    installed = list_constructors(group)
    if isinstance(choices, dict):
        return {name: value for name, value in choices.items() if name in installed}
    return type(choices)(name for name in choices if name in installed)
