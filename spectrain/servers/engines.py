"""The engines whose own commands model cards and plans print: by name, as users know them."""

from collections.abc import Callable
from dataclasses import dataclass

from .commands import EngineCommand, EngineLaunch
from .llamacpp_command import serve_llamacpp
from .sglang_command import serve_sglang
from .vllm_command import serve_vllm


@dataclass(frozen=True)
class Engine:
    """An engine and its own command for a launch."""

    title: str
    make_command: Callable[[EngineLaunch], EngineCommand]
    # Format in which the target has to be exported for it; None for an engine that reads transformers' files.
    target_format: str | None = None


ENGINES = {
    "vllm": Engine("vLLM", serve_vllm),
    "sglang": Engine("SGLang", serve_sglang),
    "llamacpp": Engine("llama.cpp", serve_llamacpp, "gguf"),
}
