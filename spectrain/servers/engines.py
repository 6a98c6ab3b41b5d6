"""The engines whose own commands model cards and plans print: by name, as users know them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from spectrain.config.installed import load_entry_points

from .commands import Engine, EngineLaunch
from .sglang_command import serve_sglang
from .vllm_command import serve_vllm

ENGINES: dict[str, Engine] = {
    "vllm": Engine("vLLM", serve_vllm, simulates=True, read_versions=("0.32", "0.33")),
    "sglang": Engine("SGLang", serve_sglang, simulates=True, read_versions=("0.5.23",)),
    # Those of installed packages.
    **{name: engine for more in load_entry_points("engines") for name, engine in more.items()},
}


def simulate_acceptance(
    launches: Mapping[str, EngineLaunch], rates: Sequence[float]
) -> dict[str, EngineLaunch]:
    """Return the launches of engines that can accept drafts at random, at the rate of each
    position.

    Positions beyond the rates are rejected.
    """

    def simulate(launch: EngineLaunch) -> EngineLaunch:
        assert launch.drafter is not None, "only drafts can be accepted"
        count = launch.drafter.num_tokens
        return replace(launch, acceptance_rates=tuple([*rates, *[0.0] * count][:count]))

    # Of this project's own engine, which takes no command of its own, there is none.
    able = [name for name in launches if name in ENGINES and ENGINES[name].simulates]
    return {name: simulate(launches[name]) for name in able}
