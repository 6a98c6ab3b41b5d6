"""The engines whose own commands model cards and plans print: by name, as users know them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from .commands import EngineCommand, EngineLaunch
from .llamacpp_command import serve_llamacpp
from .openvino_command import serve_openvino
from .sglang_command import serve_sglang
from .vllm_command import serve_vllm


@dataclass(frozen=True)
class Engine:
    """An engine and its own command for a launch."""

    title: str
    make_command: Callable[[EngineLaunch], EngineCommand]
    # Format in which the target has to be exported for it; None for an engine that reads
    # transformers' files.
    target_format: str | None = None
    # Whether it can accept drafts at random, at given rates.
    simulates: bool = False


ENGINES = {
    "vllm": Engine("vLLM", serve_vllm, simulates=True),
    "sglang": Engine("SGLang", serve_sglang, simulates=True),
    "llamacpp": Engine("llama.cpp", serve_llamacpp, "gguf"),
    "openvino": Engine("OpenVINO", serve_openvino),
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

    return {name: simulate(launch) for name, launch in launches.items() if ENGINES[name].simulates}
