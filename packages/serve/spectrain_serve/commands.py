"""The commands of this package, which the core's command line finds. What a command does is
imported when it is called.
"""

from pathlib import Path
from typing import Any

from spectrain.config.commands import (
    InstalledCommands,
    command_words,
    read_command,
    read_command_run,
)
from spectrain.output.verbosity import print_json


def serve(config: Any) -> None:
    from .engines.serve import serve_command

    spec, settings = read_command_run(config, "capture", "print_only", "out")
    serve_command(spec, **settings)


def follow(config: Any) -> None:
    from .follow.command import follow_command

    follow_command(config, command_words())


def follow_status(config: Any) -> None:
    from .follow.status import status_command

    status_command(**read_command(config, ("run", "rollback")))


def bench_engine(config: Any) -> None:
    from .times.bench import bench_engine
    from .times.row_times import CONTENT

    spec, settings = read_command_run(config, "bench", "out")
    print_json(CONTENT.dump_python(bench_engine(spec, **settings), mode="json"))


COMMANDS = InstalledCommands(
    Path(__file__).with_name("help.yaml"),
    {
        "serve": serve,
        "follow": follow,
        "follow status": follow_status,
        "bench engine": bench_engine,
    },
)
