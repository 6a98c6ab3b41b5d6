"""The commands of this package, which the core's command line finds. What a command does is
imported when it is called.
"""

from pathlib import Path
from typing import Any

from spectrain.config.commands import InstalledCommands, command_words, read_command


def follow(config: Any) -> None:
    from .follow.command import follow_command

    follow_command(config, command_words())


def follow_status(config: Any) -> None:
    from .follow.command import status_command

    status_command(**read_command(config, ("run", "rollback")))


COMMANDS = InstalledCommands(
    Path(__file__).with_name("help.yaml"), {"follow": follow, "follow status": follow_status}
)
