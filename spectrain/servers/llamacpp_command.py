"""The command that starts llama.cpp's server. It reads the target and the drafter as GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .commands import DrafterLaunch, EngineCommand, EngineLaunch, to_options

# Names of the files that `spectrain export format=gguf` writes.
DRAFTER_FILE, TARGET_FILE = "drafter.gguf", "target.gguf"


def serve_llamacpp(launch: EngineLaunch) -> EngineCommand:
    """Return llama.cpp's own command for a launch, as a user types it."""
    return EngineCommand(["llama-server", *to_options(model_options(launch))])


def model_options(launch: EngineLaunch) -> dict[str, Any]:
    """Return the options of the target and, with a drafter, of drafting."""
    is_file = launch.target.endswith(".gguf")
    options = {"-m": launch.target if is_file else str(Path(launch.target) / TARGET_FILE)}
    return options | ({} if launch.drafter is None else drafting_options(launch.drafter))


def drafting_options(drafter: DrafterLaunch) -> dict[str, Any]:
    assert drafter.path is not None
    path = str(Path(drafter.path) / DRAFTER_FILE)
    return {"-md": path, "--spec-type": drafter.method, "--spec-draft-n-max": drafter.num_tokens}
