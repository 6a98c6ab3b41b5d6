"""SGLang's own command for a launch. It was read in SGLang's source and not run here, because
SGLang needs a GPU.
"""

from __future__ import annotations

from typing import Any

from .commands import DrafterLaunch, EngineCommand, EngineLaunch, round_rates, to_options

# Methods that draft a block in one forward; SGLang's number counts the last committed token too.
BLOCK_METHODS = ("DFLASH", "UNO")
COSTS_OPTION = "--speculative-dspark-sps-table-path"
"""Times of forwards by their tokens. SGLang reads them where it may verify fewer tokens of one text
than of another.
"""


def serve_sglang(launch: EngineLaunch) -> EngineCommand:
    """Return SGLang's own command, as a user types it, and the variables that simulate
    acceptance.
    """
    options = {
        "--model-path": launch.target,
        **({} if launch.drafter is None else drafting_options(launch.drafter)),
    }
    variables = {} if not launch.acceptance_rates else simulation_variables(launch.acceptance_rates)
    if COSTS_OPTION in options:
        variables |= {"SGLANG_RAGGED_VERIFY_MODE": "compact"}
    return EngineCommand(["python", "-m", "sglang.launch_server", *to_options(options)], variables)


def drafting_options(drafter: DrafterLaunch) -> dict[str, Any]:
    path_option = "--uno-lora-path" if drafter.method == "UNO" else "--speculative-draft-model-path"
    options: dict[str, Any] = {"--speculative-algorithm": drafter.method, path_option: drafter.path}
    if drafter.method == "DSPARK":
        options |= {"--speculative-dspark-block-size": drafter.num_tokens}
        return {**options, **drafter.options}
    if drafter.method not in BLOCK_METHODS:
        options |= {"--speculative-num-steps": drafter.num_tokens, "--speculative-eagle-topk": 1}
    return {
        **options,
        "--speculative-num-draft-tokens": drafter.num_tokens + 1,
        **drafter.options,
    }


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
