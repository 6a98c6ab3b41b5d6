"""The command that starts llama.cpp's server. It reads the target and the drafter as GGUF files."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrain.errors import UserError

from .commands import LOOKUP, DrafterLaunch, EngineCommand, EngineLaunch, to_options
from .settings import EngineSettings

# Names of the files that `spectrain export format=gguf` writes.
DRAFTER_FILE = "drafter.gguf"
TARGET_FILE = "target.gguf"
# Tokens of the text that must match for the lookup to copy what followed them.
LOOKUP_MATCH = 4
# What make llama-cpp installs, below the project.
INSTALLED = Path(".llama-cpp/llama-server")


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


def start_llamacpp(launch: EngineLaunch, settings: LlamaCppSettings, program: str) -> EngineCommand:
    """Return the command that `spectrain serve` starts. With float32 weights the caches of keys
    and values are float32, too.
    """
    length = settings.max_length
    options: dict[str, Any] = {
        "--host": settings.host,
        "--port": settings.port,
        "--alias": launch.served_name,
        "--metrics": True,
        "-np": settings.slots,
        "-c": None if length is None else length * settings.slots,
        "-t": settings.threads,
        **model_options(launch),
    }
    has_model = launch.drafter is not None and launch.drafter.method != LOOKUP
    caches = ("-ctk", "-ctv", *(("-ctkd", "-ctvd") if has_model else ()))
    options |= dict.fromkeys(caches, "f32" if launch.dtype == "float32" else None)
    if has_model:
        options["-td"] = settings.threads
    return EngineCommand([program, *to_options(options), *map(str, settings.arguments)])


def find_program(program: str | None) -> str | None:
    """Return the path of llama.cpp's server: the given one, that of make llama-cpp, or that on
    the PATH; None without one.
    """
    if program is not None:
        return shutil.which(str(Path(program).expanduser()))
    installed = (folder / INSTALLED for folder in (Path.cwd(), Path(__file__).parents[2]))
    return next((str(path) for path in installed if path.exists()), None) or shutil.which(
        "llama-server"
    )


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
    path = str(Path(drafter.path) / DRAFTER_FILE)
    return {"-md": path, "--spec-type": drafter.method, "--spec-draft-n-max": drafter.num_tokens}
