"""The linter's finding for settings that only a command sets, in the files of a drafter or of a
run folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from spectrain.config.command_only import find_command_only
from spectrain.config.plain_files import read_json, read_yaml
from spectrain.errors import UserError

from .container import Finding


def check_command_only(directory: Path) -> Iterator[Finding]:
    """Yield an error for every setting of a drafter's directory, and of its run folder, that
    only a command sets.
    """
    run = directory.parent if directory.name == "drafter" else directory
    for path in (directory / "config.json", directory / "spectrain.json", run / "config.yaml"):
        if not path.is_file():
            continue
        # Other checks report a file that cannot be read.
        with suppress(UserError):
            content = read_yaml(path) if path.suffix == ".yaml" else read_json(path)
            groups = (
                content.get("description")
                if path.name == "spectrain.json" and isinstance(content, dict)
                else content
            )
            for key, setting in find_command_only(groups):
                yield Finding(
                    "command-only",
                    "error",
                    f"{path.name}: {key} is set, which {setting.reason}",
                    "a file from elsewhere must not decide what runs on your machine",
                    f"delete {key} in {path.name}",
                )
