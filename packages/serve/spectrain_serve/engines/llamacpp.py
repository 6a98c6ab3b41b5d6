"""Starting llama.cpp's server."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from spectrain.errors import UserError
from spectrain.servers.commands import LOOKUP, EngineCommand, EngineLaunch, to_options

from .llamacpp_command import LlamaCppSettings, model_options
from .llamacpp_server import LlamaCppServer
from .starter import EngineStarter

# What make llama-cpp installs, below the project.
INSTALLED = Path(".llama-cpp/llama-server")
VERSION_LINE = re.compile(r"^version: (.+)$", re.MULTILINE)
VERSION_SECONDS = 30


class LlamaCppStarter(EngineStarter):
    """Starts llama.cpp's server."""

    target_format = "gguf"
    starts_quickly = True

    def __init__(self, server: LlamaCppServer) -> None:
        super().__init__(server)
        self.settings = server.settings

    def check_installed(self) -> None:
        if find_program(self.settings.program) is None:
            raise UserError(
                f"server.program={self.settings.program}: llama.cpp's server is not installed; "
                "run make llama-cpp in the folder of this project, or give the path of "
                "llama-server"
            )

    def read_version(self) -> str | None:
        """Return the version and the commit that the program prints."""
        program = find_program(self.settings.program)
        if program is None:
            return None
        try:
            done = subprocess.run(
                [program, "--version"],
                capture_output=True,
                text=True,
                check=False,
                timeout=VERSION_SECONDS,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        match = VERSION_LINE.search(done.stdout + done.stderr)
        return None if match is None else match[1]

    def make_command(self, launch: EngineLaunch) -> EngineCommand:
        program = find_program(self.settings.program) or "llama-server"
        return start_llamacpp(self.settings.complete_launch(launch), self.settings, program)


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
    # The folder of the project, where this package is installed from a checkout.
    installed = (folder / INSTALLED for folder in (Path.cwd(), Path(__file__).parents[4]))
    return next((str(path) for path in installed if path.exists()), None) or shutil.which(
        "llama-server"
    )
