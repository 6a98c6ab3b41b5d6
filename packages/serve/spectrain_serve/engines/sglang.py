"""Starting SGLang. It was read in SGLang's source and not run here, because SGLang needs a GPU."""

from __future__ import annotations

from typing import Any

from spectrain.errors import UserError
from spectrain.servers.commands import EngineCommand, EngineLaunch, to_options
from spectrain.servers.sglang_command import drafting_options, simulation_variables

from ..servers.settings import EngineSettings
from ..servers.sglang import SglangServer
from .environments import EngineEnvironment, read_environment
from .starter import EngineStarter

PACKAGES = ("sglang",)


class SglangStarter(EngineStarter):
    """Starts SGLang."""

    def __init__(self, server: SglangServer) -> None:
        super().__init__(server)
        self.settings = server.settings

    @property
    def environment(self) -> EngineEnvironment:
        """Return the environment in which the engine is started."""
        return read_environment(self.settings.python, PACKAGES)

    def check_installed(self) -> None:
        self.environment.require_engine("SGLang", "sglang")

    def read_version(self) -> str | None:
        return next(iter(self.environment.versions.values()), None)

    def make_command(self, launch: EngineLaunch) -> EngineCommand:
        return start_sglang(
            self.settings.complete_launch(launch), self.settings, self.environment.python
        )


def start_sglang(launch: EngineLaunch, settings: EngineSettings, python: str) -> EngineCommand:
    """Return the command that `spectrain serve` starts, with the interpreter of SGLang's
    environment.
    """
    options: dict[str, Any] = {
        "--model-path": launch.target,
        "--served-model-name": launch.served_name,
        "--host": settings.host,
        "--port": settings.port,
        "--dtype": launch.dtype,
        "--context-length": settings.max_length,
    }
    if launch.drafter is not None:
        options |= drafting_options(launch.drafter)
    words = to_options(options) + capture_words(launch.capture_layers)
    variables = {} if not launch.acceptance_rates else simulation_variables(launch.acceptance_rates)
    return EngineCommand(
        [python, "-m", "sglang.launch_server", *words, *map(str, settings.arguments)], variables
    )


def capture_words(layers: tuple[int, ...] | None) -> list[str]:
    """Return the arguments that capture layers, whose numbers name what comes out of a layer and so
    are ours less one.

    The algorithm only names this numbering: nothing is drafted. Cached prefixes would be missing
    from the states. DFLASH has this numbering everywhere, but fewer models have it; EAGLE3 has it
    in DeepSeek and GLM only if the first number is 1.
    """
    if layers is None:
        return []
    if 0 in layers:
        raise UserError(
            "server=sglang: it cannot return the embeddings, which are layer 0; use server=vllm "
            "or other layers"
        )
    numbers = [str(layer - 1) for layer in layers]
    return [
        "--speculative-algorithm",
        "EAGLE3" if numbers[0] == "1" else "DFLASH",
        "--enable-return-aux-hidden-states",
        "--return-aux-hidden-state-layer-ids",
        *numbers,
        "--disable-radix-cache",
    ]
