"""Starting OpenVINO GenAI. It is a library, so a script of spectrain serves it
(plugins/spectrain_openvino.py).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from spectrain.errors import UserError
from spectrain.files import make_folder_once
from spectrain.models.published import cache_directory
from spectrain.servers.commands import LOOKUP, EngineCommand, EngineLaunch, to_options
from spectrain.trees import Eagle2
from spectrain.trees.base import TreeBuilder

from .environments import EngineEnvironment
from .openvino_command import PRECISIONS, OpenVinoSettings
from .openvino_ir import IR_NAME, IrConverter, read_openvino_environment
from .openvino_server import OpenVinoServer
from .starter import EngineStarter

SCRIPT = Path(__file__).parent / "plugins" / "spectrain_openvino.py"
SEQUENTIAL_METHODS = ("dflash",)
"""Methods with which OpenVINO decodes one request at a time; the others wait."""
# Most tokens of the text's end that the lookup searches for.
LOOKUP_MATCH = 4


class OpenVinoStarter(EngineStarter):
    """Starts OpenVINO GenAI behind the script."""

    starts_quickly = True
    chooses_draft_length = True

    def __init__(self, server: OpenVinoServer) -> None:
        super().__init__(server)
        self.settings = server.settings

    def make_builder(self, num_tokens: int) -> TreeBuilder:
        depth = self.settings.tree_depth
        branches = self.settings.branching_factor
        return (
            super().make_builder(num_tokens)
            if not depth or not branches
            else Eagle2(depth, num_tokens + 1, branches)
        )

    @property
    def environment(self) -> EngineEnvironment:
        """Return the environment in which the engine is started."""
        return read_openvino_environment(self.settings.python, "server.python")

    def check_installed(self) -> None:
        # Reading the environment raises where something is missing.
        assert self.environment.versions

    def read_version(self) -> str | None:
        return self.environment.versions.get("openvino-genai")

    def make_command(self, launch: EngineLaunch) -> EngineCommand:
        if launch.capture_layers is not None:
            raise UserError(
                "capture=true: OpenVINO gives no hidden states; capture with server=vllm"
            )
        launch = self.settings.complete_launch(
            replace(launch, target=str(self._target_folder(launch)))
        )
        return start_openvino(launch, self.settings, self.environment)

    def prepare_start(self, launch: EngineLaunch) -> None:
        """Convert the target to OpenVINO's format, once for all starts."""
        folder = self._target_folder(launch)
        if not (folder / f"{IR_NAME}.xml").exists():
            print(f"{launch.target} is converted to OpenVINO's format, into {folder}", flush=True)
            converter = IrConverter(self.settings.python, self.settings.weights, "server.python")
            make_folder_once(
                folder, f"{IR_NAME}.xml", lambda scratch: converter.convert(launch.target, scratch)
            )

    def _target_folder(self, launch: EngineLaunch) -> Path:
        """Return the folder of the target's IR: its own folder if it holds one, or else one in
        the cache.
        """
        source = Path(launch.target)
        if (source / f"{IR_NAME}.xml").exists():
            return source
        digest = hashlib.sha256(
            json.dumps([launch.target, self.settings.weights, list_files(source)]).encode()
        )
        return (
            cache_directory()
            / "openvino"
            / f"{source.name}-{self.settings.weights}-{digest.hexdigest()[:12]}"
        )


def start_openvino(
    launch: EngineLaunch, settings: OpenVinoSettings, environment: EngineEnvironment
) -> EngineCommand:
    """Return the command that `spectrain serve` starts, in OpenVINO's environment; the target is
    the folder of its IR.

    The interpreter runs isolated, so that no variable of spectrain's own environment changes what
    it imports.
    """
    options: dict[str, Any] = {
        "--target": launch.target,
        "--model-name": launch.served_name,
        "--host": settings.host,
        "--port": settings.port,
        "--precision": PRECISIONS[launch.dtype],
        "--threads": settings.threads,
        "--device": settings.device,
        "--max-length": settings.max_length,
    }
    if launch.drafter is not None and launch.drafter.method == LOOKUP:
        options |= {
            "--lookup-match": LOOKUP_MATCH,
            "--num-assistant-tokens": launch.drafter.num_tokens,
        }
    elif launch.drafter is not None:
        options |= {
            "--drafter": launch.drafter.path,
            "--num-assistant-tokens": launch.drafter.num_tokens,
            "--branching-factor": settings.branching_factor,
            "--tree-depth": settings.tree_depth,
            "--max-requests": 1 if launch.drafter.method in SEQUENTIAL_METHODS else None,
        }
    return EngineCommand(
        [environment.python, "-I", str(SCRIPT), *to_options(options), *map(str, settings.arguments)]
    )


def list_files(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of a model's files; [] for a name on the hub."""
    files = (
        sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]) if folder.is_dir() else []
    )
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
