"""Commands of the command line: what a command is, those that installed packages add, and how a
command reads its settings from the configuration that hydra composes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectrain.output.verbosity import OUTPUT_FLAGS

from .choices import load_yaml
from .installed import load_entry_points
from .settings_file import SettingsFile

if TYPE_CHECKING:
    from .spec import RunSpec

Task = Callable[[Any], Any]
"""What a command does, with its configuration or, where it has none, with its words."""


@dataclass(frozen=True)
class Command:
    """A command: its purpose in one line, examples with explanations, where its results go, and
    its configuration in conf/.
    """

    about: str
    examples: dict[str, str]
    results: str
    # The configuration in conf/; None passes the words unchanged.
    config: str | None = None
    flags: dict[str, str] = field(default_factory=dict)
    # Those flags about output that the command takes, whose meanings are the same everywhere.
    output: list[str] = field(default_factory=lambda: [*OUTPUT_FLAGS])
    # Whether the command prints nothing but its result, so that --quiet leaves out nothing.
    is_result: bool = False
    note: str = ""
    # The keys used most, which help without a topic shows.
    keys: list[str] = field(default_factory=list)
    # Flag -> a setting, or the key whose value follows it.
    stands: dict[str, str] = field(default_factory=dict)
    # Keys of positional words.
    places: list[str] = field(default_factory=list)
    # Whether the first word may be a settings file.
    takes_file: bool = False
    # The key of the drafter that the command reads unless drafter=CHOICE is given.
    drafter: str | None = None
    # Setting that is implied -> groups, any of which replaces it.
    implied: dict[str, list[str]] = field(default_factory=dict)
    # The command after which lists show a command of an installed package.
    after: str | None = None


@dataclass(frozen=True)
class InstalledCommands:
    """The commands of an installed package. Its entry point is in `spectrain.commands`."""

    # The yaml with what `--help` prints, in the form of the core's cli/help.yaml.
    help: Path
    tasks: Mapping[str, Task]


def add_installed_commands(commands: Mapping[str, Command]) -> dict[str, Command]:
    """Return commands by name with those of installed packages, each after the one that it names,
    which may be another package's.
    """
    added = {
        name: Command(**entry)
        for installed in load_entry_points("commands")
        for name, entry in load_yaml(installed.help)["commands"].items()
    }
    result: dict[str, Command] = {}

    def place(name: str, command: Command) -> None:
        result[name] = command
        for other, follower in added.items():
            if follower.after == name:
                place(other, follower)

    for name, command in commands.items():
        place(name, command)
    # Those behind a command that is not installed stand at the end.
    return {**result, **{name: command for name, command in added.items() if name not in result}}


def add_installed_tasks(tasks: Mapping[str, Task]) -> dict[str, Task]:
    """Return tasks by command with those of installed packages."""
    return dict(tasks) | {
        name: task
        for installed in load_entry_points("commands")
        for name, task in installed.tasks.items()
    }


# Settings of a command. What composes a configuration is imported here alone, because help and
# completion do without.


def read_command(config: Any, keys: Sequence[str]) -> dict[str, Any]:
    """Return the checked settings of a command by key."""
    from hydra.core.hydra_config import HydraConfig

    from .resolve import resolve

    return resolve(config, keys, command_words() if HydraConfig.initialized() else ())


def read_command_run(config: Any, *keys: str) -> tuple[RunSpec, dict[str, Any]]:
    """Return the checked settings of a run, with its recipe's name and the command's own words,
    and those of more keys.
    """
    from hydra.core.hydra_config import HydraConfig

    from .spec import read_run

    recipe = HydraConfig.get().runtime.choices.get("recipe")
    file = next(iter(_settings_file), None)
    return read_run(config, keys, command_words(), recipe, file=file)


_settings_file: list[SettingsFile] = []
"""The settings file of the command that runs, or none."""


def set_settings_file(file: SettingsFile | None) -> None:
    """Set the settings file of the command that runs."""
    _settings_file[:] = [] if file is None else [file]


def command_words() -> list[str]:
    """Return the words of the command that hydra runs, those of its settings file first."""
    from hydra.core.hydra_config import HydraConfig

    return [*HydraConfig.get().overrides.task]
