"""Documented commands resolve to the configurations that were recorded."""

import pytest

from spectrain.config.build import register_resolvers
from tests.docs.golden_commands import list_composed_commands, read_golden, resolve_commands

COMMANDS = list_composed_commands()
HOW = "if the change is meant, write the file again: python -m tests.docs.golden_commands"


def test_every_documented_command_is_recorded() -> None:
    assert list(read_golden()) == list(COMMANDS), HOW


def test_only_fragments_of_commands_cannot_be_composed() -> None:
    """A sentence may name a command without its recipe; whatever names one is complete."""
    failed = [command for command, settings in read_golden().items() if "error" in settings]
    assert not [command for command in failed if "recipe=" in command or ".yaml" in command]


def check_commands(names: list[str]) -> None:
    """Compare the resolved settings of these commands with the recorded ones."""
    recorded = read_golden()
    try:
        resolved = resolve_commands({name: COMMANDS[name] for name in names})
    finally:
        register_resolvers()
    for command, settings in resolved.items():
        assert settings == recorded[command], f"spectrain {command}: {HOW}"


def test_a_sample_of_commands_resolves_as_recorded() -> None:
    """Every sixteenth command, because hydra takes a tenth of a second for each."""
    check_commands(list(COMMANDS)[::16])


@pytest.mark.slow
def test_all_commands_resolve_as_recorded() -> None:
    check_commands(list(COMMANDS))
