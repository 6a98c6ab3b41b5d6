"""llama.cpp's own command for a launch, and the settings of its server. It reads the target and the
drafter as GGUF files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrain.errors import UserError
from spectrain.servers.commands import (
    LOOKUP,
    DrafterLaunch,
    EngineCommand,
    EngineLaunch,
    to_options,
)

from ..servers.settings import EngineSettings

# Names of the files that `spectrain export format=gguf` writes.
DRAFTER_FILE = "drafter.gguf"
TARGET_FILE = "target.gguf"
# Tokens of the text that must match for the lookup to copy what followed them.
LOOKUP_MATCH = 4


@dataclass
class LlamaCppSettings(EngineSettings):
    """Settings of server=llamacpp."""

    # Program of llama.cpp's server; null takes what make llama-cpp installed, or else llama-server
    # on the PATH.
    program: str | None = None
    # Number of threads of a started engine; null takes llama.cpp's default.
    threads: int | None = None
    # Number of requests that a started engine decodes together, each with a context of its own;
    # further ones wait.
    slots: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("threads", "slots"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise UserError(f"server.{key}={value}: use 1 or more")


def serve_llamacpp(launch: EngineLaunch) -> EngineCommand:
    """Return llama.cpp's own command for a launch, as a user types it."""
    return EngineCommand(["llama-server", *to_options(model_options(launch))])


def model_options(launch: EngineLaunch) -> dict[str, Any]:
    """Return the options of the target and, with a drafter, of drafting."""
    is_file = launch.target.endswith(".gguf")
    options = {"-m": launch.target if is_file else str(Path(launch.target) / TARGET_FILE)}
    return options | ({} if launch.drafter is None else drafting_options(launch.drafter))


def drafting_options(drafter: DrafterLaunch) -> dict[str, Any]:
    """Return the options of a drafter, or of llama.cpp's own lookup, which drafts so many tokens
    or none.
    """
    if drafter.method == LOOKUP:
        lengths = dict.fromkeys(
            ("--spec-ngram-mod-n-min", "--spec-ngram-mod-n-max"), drafter.num_tokens
        )
        return {"--spec-type": "ngram-mod", "--spec-ngram-mod-n-match": LOOKUP_MATCH, **lengths}
    assert drafter.path is not None
    is_file = drafter.path.endswith(".gguf")
    path = drafter.path if is_file else str(Path(drafter.path) / DRAFTER_FILE)
    return {"-md": path, "--spec-type": drafter.method, "--spec-draft-n-max": drafter.num_tokens}
