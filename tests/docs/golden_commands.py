"""The resolved configuration of every documented command, which a change of the code's structure
leaves as it is.

    python -m tests.docs.golden_commands     # writes tests/docs/golden_commands.json again, after a
    change of settings or pages

Equal groups of settings are stored once, because most commands share theirs. A group is shown with
its choice and with the defaults of its constructor, so that a lost setting shows too, and without
the constructor's import path, which may move.
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from spectrain.cli.help import COMMANDS, HELP_WORDS
from spectrain.cli.overrides import (
    BARE_FLAGS,
    VALUE_FLAGS,
    to_settings,
    write_overrides,
)
from spectrain.cli.settings_file import split_settings_file
from spectrain.config.build import GroupSpec, register_resolvers
from spectrain.config.choices import find_group
from tests.docs.test_docs import DOCUMENTED

GOLDEN = Path(__file__).with_suffix(".json")


def list_composed_commands() -> dict[str, tuple[str, list[str]]]:
    """Return documented command -> name of its configuration, and its settings as words."""
    commands = {}
    for command in sorted({command for _, command in DOCUMENTED}):
        words = shlex.split(command)
        is_pair = words[:1] in (["data"], ["bench"]) or " ".join(words[:2]) in COMMANDS
        name = " ".join(words[: 2 if is_pair else 1])
        config = COMMANDS[name].config if name in COMMANDS else None
        # Folders of configurations outside the package have tests of their own.
        if config is None or "--config-dir" in words or any(word in HELP_WORDS for word in words):
            continue
        file, own = split_settings_file(name, words[len(name.split()) :])
        settings = [*(file.words if file else ()), *select_first_run(to_settings(name, own))]
        commands[command] = config, settings
    return commands


def select_first_run(words: list[str]) -> list[str]:
    """Return the settings of the first run of a sweep, or all settings of a command without one."""
    is_sweep = any(word in ("-m", "--multirun") for word in words)
    settings = []
    previous = ""
    for word in words:
        if (
            word not in BARE_FLAGS
            and word not in VALUE_FLAGS
            and previous not in VALUE_FLAGS
            and not word.startswith("--")
            and (word.startswith("recipe=") or "hydra" not in word)
        ):
            settings.append(word.partition(",")[0] if is_sweep and "[" not in word else word)
        previous = word
    return settings


def resolve_command(config_name: str, words: list[str]) -> dict[str, Any]:
    """Return a command's resolved settings, groups by their choice; the error as text where it
    cannot be composed.
    """
    try:
        config = compose(config_name, overrides=write_overrides(words))
        plain: Any = OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        return {"error": str(error).splitlines()[0]}
    return {key: describe_group(key, value) for key, value in plain.items()}


def describe_group(key: str, value: Any) -> Any:
    """Return a group with its choice and its constructor's defaults, and any other value
    unchanged.
    """
    if not isinstance(value, Mapping) or "_target_" not in value:
        return value
    group = GroupSpec.from_node(find_group(str(value["_target_"])), value)
    return {"choice": group.choice, **json.loads(json.dumps(group.with_defaults()))}


def resolve_commands(commands: dict[str, tuple[str, list[str]]]) -> dict[str, dict[str, Any]]:
    """Return command -> resolved settings."""
    register_resolvers("cpu")
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        return {command: resolve_command(*settings) for command, settings in commands.items()}


def write_golden(resolved: dict[str, dict[str, Any]]) -> str:
    """Return the text of the golden file: every group of settings on a line, then every command
    with its lines' numbers.
    """
    numbers: dict[str, int] = {}

    def number_group(value: Any) -> Any:
        return (
            numbers.setdefault(json.dumps(value, sort_keys=True), len(numbers))
            if isinstance(value, dict)
            else [value]
        )

    commands = {
        command: {key: number_group(value) for key, value in settings.items()}
        for command, settings in resolved.items()
    }
    lines = [
        f"{json.dumps(command)}: {json.dumps(settings)}" for command, settings in commands.items()
    ]
    return (
        '{"groups": [\n'
        + ",\n".join(numbers)
        + '\n],\n"commands": {\n'
        + ",\n".join(lines)
        + "\n}}\n"
    )


def read_golden() -> dict[str, dict[str, Any]]:
    """Return command -> resolved settings, as they were recorded."""
    content = json.loads(GOLDEN.read_text())
    return {
        command: {
            key: value[0] if isinstance(value, list) else content["groups"][value]
            for key, value in settings.items()
        }
        for command, settings in content["commands"].items()
    }


if __name__ == "__main__":
    GOLDEN.write_text(write_golden(resolve_commands(list_composed_commands())))
    print(f"{GOLDEN}: written")
