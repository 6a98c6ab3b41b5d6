"""vLLM's own command for a launch."""

from __future__ import annotations

import json
from typing import Any

from .commands import DrafterLaunch, EngineCommand, EngineLaunch, round_rates, to_options


def serve_vllm(launch: EngineLaunch) -> EngineCommand:
    """Return vLLM's own command for a launch, as a user types it."""
    return EngineCommand(["vllm", "serve", launch.target, *to_options(drafting_options(launch))])


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
        **drafter.options,
    }
    if acceptance_rates:
        rates = round_rates(acceptance_rates)
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    return config
