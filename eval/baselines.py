"""What a drafted run is held against: transformers' own `generate`, token by token, and its own ways of drafting."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from spectrain.errors import UserError
from spectrain.eval.metrics import Turn
from spectrain.models.plain import generate, plain_model
from spectrain.models.target import Target

TRANSFORMERS = ("generate", "prompt_lookup", "assistant", "early_exit")


def run_transformers(
    target: Target, turns: Sequence[Turn], names: list[str], assistant: str | None, exit_layer: int | None
) -> dict[str, Any]:
    """Greedy decoding by `generate`, plain and with its own drafting, prompt by prompt and interleaved.

    All its numbers include prefill, and each speedup is over its plain `generate`, for that engine is another than ours.
    """
    ways: dict[str, dict[str, Any]] = {"generate": {}}
    if "prompt_lookup" in names:
        ways["prompt_lookup"] = {"prompt_lookup_num_tokens": 10}
    if "assistant" in names and assistant is not None:
        ways["assistant"] = {"assistant_model": _assistant(target, assistant)}
    if "early_exit" in names and exit_layer is not None:
        if exit_layer >= target.num_layers:
            raise UserError(f"eval.exit_layer={exit_layer}: {target.name} has {target.num_layers} layers; use fewer")
        ways["early_exit"] = {"assistant_early_exit": exit_layer}
    seconds = dict.fromkeys(ways, 0.0)
    tokens, forwards, identical = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0), dict.fromkeys(ways, 0)
    with plain_model(target) as model, _count_forwards(model, target.num_layers) as counted:
        for number, turn in enumerate(turns):
            outputs = {}
            for offset in range(len(ways)):
                name = list(ways)[(offset + number) % len(ways)]
                before, began = len(counted), time.perf_counter()
                limit = len(turn.autoregressive.output)
                outputs[name] = generate(model, turn.autoregressive.prompt, limit, target.stop_ids, **ways[name])
                seconds[name] += time.perf_counter() - began
                tokens[name] += len(outputs[name])
                forwards[name] += len(counted) - before
            for name in ways:
                identical[name] += outputs[name] == outputs["generate"]
    plain = tokens["generate"] / seconds["generate"]
    return {
        name: {
            "tokens_per_second": round(tokens[name] / seconds[name], 3),
            "speedup": round(tokens[name] / seconds[name] / plain, 4),
            "tokens_per_forward": round(tokens[name] / max(forwards[name], 1), 4),
            "identical": identical[name],
            "checked": len(turns),
        }
        for name in ways
    }


def _assistant(target: Target, path: str) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=target.dtype, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"eval.assistant={path}: it cannot be loaded ({reason}); give a directory or a model's name") from error
    return model.to(target.device).eval()


@contextmanager
def _count_forwards(model: Any, num_layers: int) -> Iterator[list[int]]:
    """Forwards of the whole model; early exit drafts with the same model while its configuration says fewer layers."""
    counted: list[int] = []

    def count(module: Any, args: Any, output: Any) -> None:
        if model.config.num_hidden_layers == num_layers:
            counted.append(1)

    handle = model.register_forward_hook(count)
    try:
        yield counted
    finally:
        handle.remove()
