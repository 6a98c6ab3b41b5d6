"""OpenVINO GenAI: answers with token ids and the rounds of each answer."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from spectrain.errors import UserError
from spectrain.files import make_folder_once
from spectrain.models.published import cache_directory
from spectrain.trees import Eagle2
from spectrain.trees.base import TreeBuilder

from .base import (
    CompletionRequest,
    DraftCounters,
    DraftedRounds,
    ServerCapabilities,
    TimedStep,
    add_counters,
)
from .commands import EngineCommand, EngineLaunch
from .environments import EngineEnvironment
from .openai import OpenAIServer
from .openvino_command import OpenVinoSettings, start_openvino
from .openvino_ir import IR_NAME, IrConverter, read_openvino_environment


class OpenVinoServer(OpenAIServer):
    """OpenVINO GenAI behind spectrain's own script, which serves many requests together."""

    name = "openvino"
    capabilities: ClassVar[ServerCapabilities] = ServerCapabilities(
        counts_drafts=True, has_lookup=True, chooses_draft_length=True, starts_quickly=True
    )
    settings: OpenVinoSettings

    def __init__(self, config: OpenVinoSettings) -> None:
        super().__init__(config)

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

    def make_builder(self, num_tokens: int) -> TreeBuilder:
        depth = self.settings.tree_depth
        branches = self.settings.branching_factor
        return (
            super().make_builder(num_tokens)
            if not depth or not branches
            else Eagle2(depth, num_tokens + 1, branches)
        )

    def request_body(self, request: CompletionRequest) -> dict[str, Any]:
        return super().request_body(request) | {"return_token_ids": True}

    def parse_rounds(self, response: dict[str, Any]) -> DraftedRounds | None:
        rounds = (response.get("metrics") or {}).get("rounds")
        return (
            None
            if rounds is None
            else DraftedRounds(tuple(rounds["accepted"]), tuple(rounds["drafted"]))
        )

    def parse_steps(self, response: dict[str, Any]) -> tuple[TimedStep, ...]:
        seconds = (response.get("metrics") or {}).get("step_seconds") or ()
        rounds = self.parse_rounds(response)
        if rounds is None:
            return tuple(TimedStep(0, 0, duration) for duration in seconds)
        return tuple(map(TimedStep, rounds.drafted, rounds.accepted, seconds))

    async def read_counters(self) -> DraftCounters | None:
        """Return what all servers have counted; None without a drafter."""
        parts = [json.loads(await client.get(f"{client.root}/counters")) for client in self.clients]
        return add_counters(
            None
            if part is None
            else DraftCounters(
                part["num_rounds"], part["num_drafted"], tuple(part["accepted_by_position"])
            )
            for part in parts
        )


def list_files(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of a model's files; [] for a name on the hub."""
    files = (
        sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]) if folder.is_dir() else []
    )
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
