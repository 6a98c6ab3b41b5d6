"""The list of the surveys' names behind docs/systems.md."""

import re
from collections.abc import Iterator

import pytest

from lab.benchmarks.systems import read_survey_names
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
