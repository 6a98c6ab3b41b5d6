"""SGLang's own command for a launch. It was read in SGLang's source and not run here, because
SGLang needs a GPU.
"""

from __future__ import annotations

from typing import Any

from spectrain.errors import UserError

from .commands import DrafterLaunch, EngineCommand, EngineLaunch, round_rates, to_options
from .settings import EngineSettings

PACKAGES = ("sglang",)
# Methods that draft a block in one forward; SGLang's number counts the last committed token too.
BLOCK_METHODS = ("DFLASH", "UNO")


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


def serve_sglang(launch: EngineLaunch) -> EngineCommand:
    """Return SGLang's own command, as a user types it, and the variables that simulate
    acceptance.
    """
    options = {
        "--model-path": launch.target,
        **({} if launch.drafter is None else drafting_options(launch.drafter)),
    }
    variables = {} if not launch.acceptance_rates else simulation_variables(launch.acceptance_rates)
    return EngineCommand(["python", "-m", "sglang.launch_server", *to_options(options)], variables)


def drafting_options(drafter: DrafterLaunch) -> dict[str, Any]:
    path_option = "--uno-lora-path" if drafter.method == "UNO" else "--speculative-draft-model-path"
    options: dict[str, Any] = {"--speculative-algorithm": drafter.method, path_option: drafter.path}
    if drafter.method == "DSPARK":
        return {**options, "--speculative-dspark-block-size": drafter.num_tokens}
    if drafter.method not in BLOCK_METHODS:
        options |= {"--speculative-num-steps": drafter.num_tokens, "--speculative-eagle-topk": 1}
    return {**options, "--speculative-num-draft-tokens": drafter.num_tokens + 1}


def simulation_variables(acceptance_rates: tuple[float, ...]) -> dict[str, str]:
    """Return the variables that simulate a mean number of tokens in a round; SGLang takes no rates
    by position.

    The drafter's own tokens are accepted, which needs a chain.
    """
    length = 1 + sum(round_rates(acceptance_rates))
    return {
        "SGLANG_SIMULATE_ACC_LEN": f"{length:.3f}",
        "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
    }
