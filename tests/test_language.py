"""Ratchets: plain names, described settings, no import circles.

The ceilings may only fall.
"""

from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path

from spectrain.config.choices import conf_folders, list_constructors
from spectrain.config.signatures import list_keys
from tests.language import (
    dialect_per_thousand,
    function_names,
    is_bare,
    is_sentence,
    is_single_word,
)
from tests.test_house import ROOT, code, imports, inside

MAX_SINGLE_WORD = 0.10  # share of the distinct function names that are one word
BARE = {"to"}  # the only bare names: `to` moves tensors, as in torch
MAX_DIALECT = 1  # dialect words per 1,000 identifiers


def find_module(imported: str, paths: Mapping[str, Path]) -> str:
    """Return the module whose name, or a name in it, is imported; "" where it is none of these."""
    while imported and imported not in paths:
        imported = imported.rpartition(".")[0]
    return imported


def map_imports() -> dict[str, set[str]]:
    """Map every module to the modules that it imports, local and type-only imports counted."""
    names = {
        inside(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for path in code()
    }
    return {
        name: {find_module(each, names) for each in imports(path)} - {name, ""}
        for name, path in names.items()
    }


def test_function_names_are_verbs_with_objects() -> None:
    names = function_names(code())
    assert sum(map(is_single_word, names)) / len(names) <= MAX_SINGLE_WORD


def test_no_more_bare_names() -> None:
    assert set(filter(is_bare, function_names(code()))) <= BARE


def test_dialect_words_fall() -> None:
    assert dialect_per_thousand(code()) <= MAX_DIALECT


def test_dialect_words_stay_out_of_tests_and_scripts() -> None:
    for folder in ("tests", "lab", "scripts", "packages"):
        paths = (ROOT / folder).rglob("*.py")
        # Wheels are built from copies.
        written = (path for path in paths if "build" not in path.relative_to(ROOT).parts)
        assert dialect_per_thousand(written) <= MAX_DIALECT, folder


def test_settings_are_described_by_sentences() -> None:
    groups = sorted(
        {entry.name for folder in conf_folders() for entry in folder.iterdir() if entry.is_dir()}
    )
    targets = {target for group in groups for target in list_constructors(group).values()}
    missing = {
        f"{target}.{key.name}"
        for target in targets
        for key in list_keys(target)
        if not is_sentence(key.description)
    }
    assert not missing, sorted(missing)


def test_no_file_imports_in_a_circle() -> None:
    """Imports inside functions and for types count too."""
    TopologicalSorter(map_imports()).prepare()
