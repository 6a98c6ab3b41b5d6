"""The list of the surveys' names behind docs/systems.md."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.benchmarks.coder_systems import TARGET, read_rows
from lab.benchmarks.systems import read_survey_names
from lab.pages.survey_tables import (
    describe_measurements,
    find_tiny,
    list_systems,
    load_coder_results,
    read_survey_systems,
)
from lab.pages.systems_page import STATES, is_installed
from spectrain.config.installed import list_package_roots

GROUPS = ("recipe", "drafter", "tree", "acceptance", "target", "source")


def list_entries() -> Iterator[tuple[str, list[str]]]:
    names = read_survey_names()
    for group in (*names["surveys"].values(), names["others"]):
        yield from group.items()


def test_every_name_has_a_state_and_a_text() -> None:
    names = read_survey_names()
    assert sum(map(len, names["surveys"].values())) == 208
    for name, (state, text, *_) in list_entries():
        assert state in STATES and text, name
        # What works has a command; what does not belong has a reason.
        assert "`" in text or state in ("out", "absent") or "builder" in text, name


def test_what_works_has_all_its_parts() -> None:
    """A name whose text says that a part is missing works in part."""
    missing = re.compile(r"\b(is|are) not built\b|\bsimulated\b")
    entries = [(name, state) for name, (state, text, *_) in list_entries() if missing.search(text)]
    assert len(entries) > 10
    assert not [name for name, state in entries if state == "works"]


def test_no_name_stands_twice() -> None:
    names = read_survey_names()
    surveyed = [name for group in names["surveys"].values() for name in group]
    assert len({name.casefold() for name in surveyed}) == len(surveyed)
    assert not {*surveyed} & {*names["others"]}


@pytest.mark.skipif(not list_package_roots(), reason="the list names choices of the packages")
@pytest.mark.parametrize("group", GROUPS)
def test_choices_of_the_commands_exist(group: str) -> None:
    """A command of the list names choices that are installed here."""
    choices = {
        choice
        for _, (_, text, *_) in list_entries()
        for code in re.findall(r"`([^`]+)`", text)
        for choice in re.findall(rf"(?<![\w.]){group}=([a-z0-9_]+)", code)
    }
    missing = [choice for choice in sorted(choices) if not is_installed(f"{group}/{choice}")]
    assert choices and not missing


def test_every_name_that_works_has_a_proof_and_what_was_measured() -> None:
    """Names that do not belong here, or are not built, have nothing to prove."""
    names = {
        name: state
        for group in read_survey_names()["surveys"].values()
        for name, (state, *_) in group.items()
    }
    content = read_survey_systems()
    assert {name for name, state in names.items() if state in ("works", "part")} == {
        *content["systems"]
    }
    root = Path(__file__).parents[2]
    for name, entry in content["systems"].items():
        assert {*entry} <= {"row", "proof", "tiny", "coder"}, name
        assert "row" in entry or "proof" in entry, name
        assert "row" not in entry or entry["row"] in list_systems(), name
        assert "proof" not in entry or (root / entry["proof"]).is_file(), name
        assert all(find_tiny(row)["acceptance_length"] for row in entry.get("tiny", ())), name
        assert all(describe_measurements(name)), name
    assert describe_measurements("CLONE") == ["", "", ""]


def test_rows_on_the_coder_are_those_of_the_names() -> None:
    """Every row belongs to a name, and what was measured had the arguments that the page shows."""
    rows = {name: text for group in read_rows().values() for name, text in group.items()}
    named = [entry["coder"] for entry in read_survey_systems()["systems"].values()]
    assert {row for rows in named if isinstance(rows, list) for row in rows} == {*rows}
    for name, row in load_coder_results()["rows"].items():
        assert row["command"] == f"eval target={TARGET} {rows[name]}", name
