"""Baselines of transformers: plain `generate`, and its own ways of drafting, prompt by prompt."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from spectrain.errors import UserError
from spectrain.eval.metrics import Turn
from spectrain.models.check import check_weights
from spectrain.models.load_errors import explain_load_error
from spectrain.models.pretrained import check_model_files, load_pretrained
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target


def run_transformers(
    target: Target,
    turns: Sequence[Turn],
    names: list[str],
    assistant: str | None,
    exit_layer: int | None,
) -> dict[str, Any]:
    """Decode greedily by `generate`, plain and with its own drafting, prompt by prompt in turn.

    All numbers include prefill, and each speedup is relative to plain `generate`, because that
    engine differs from ours.
    """
    options: dict[str, dict[str, Any]] = {"generate": {}}
    if "prompt_lookup" in names:
        options["prompt_lookup"] = {"prompt_lookup_num_tokens": 10}
    if "assistant" in names and assistant is not None:
        options["assistant"] = _load_assistant(target, assistant)
    if "early_exit" in names and exit_layer is not None:
        if exit_layer >= target.num_layers:
            raise UserError(
                f"eval.exit_layer={exit_layer}: {target.name} has {target.num_layers} layers; use "
                "fewer"
            )
        options["early_exit"] = {"assistant_early_exit": exit_layer}
    seconds = dict.fromkeys(options, 0.0)
    tokens = dict.fromkeys(options, 0)
    forwards = dict.fromkeys(options, 0)
    identical = dict.fromkeys(options, 0)
    with reference_model(target) as model, _count_forwards(model, target.num_layers) as calls:
        for number, turn in enumerate(turns):
            outputs = {}
            for offset in range(len(options)):
                name = list(options)[(offset + number) % len(options)]
                calls_before = len(calls)
                start = time.perf_counter()
                limit = len(turn.autoregressive.output)
                outputs[name] = generate(
                    model, turn.autoregressive.prompt, limit, target.stop_ids, **options[name]
                )
                seconds[name] += time.perf_counter() - start
                tokens[name] += len(outputs[name])
                forwards[name] += len(calls) - calls_before
            for name in options:
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
        for name in options
    }


def _load_assistant(target: Target, path: str) -> dict[str, Any]:
    """Return the options of `generate` for an assistant, with both tokenizers if they differ
    (universal assisted decoding).
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        check_model_files(path)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        options = {"dtype": target.dtype, "trust_remote_code": False, "use_safetensors": True}
        model: Any = load_pretrained(AutoModelForCausalLM, path, "eval.assistant", **options)
    except UserError:
        raise
    except Exception as error:  # a foreign config.json may raise anything
        reason = explain_load_error(path, error)
        raise UserError(
            f"eval.assistant={path}: it cannot be loaded ({reason}); give a directory or a "
            "model's name"
        ) from error
    check_weights(model, f"eval.assistant={path}")
    decoding = {"assistant_model": model.to(target.device).eval()}
    sizes = {model.config.get_text_config().vocab_size, target.config.vocab_size}
    # Of models with the same tokens, transformers refuses those whose embeddings are padded
    # differently.
    if tokenizer.get_vocab() != target.tokenizer.get_vocab() or len(sizes) > 1:
        decoding |= {"tokenizer": target.tokenizer, "assistant_tokenizer": tokenizer}
    return decoding


@contextmanager
def _count_forwards(model: Any, num_layers: int) -> Iterator[list[int]]:
    """Count forwards of the complete model; early exit drafts with the same model while its
    configuration says fewer layers.
    """
    calls: list[int] = []

    def record_call(module: Any, args: Any, output: Any) -> None:
        if model.config.num_hidden_layers == num_layers:
            calls.append(1)

    handle = model.register_forward_hook(record_call)
    try:
        yield calls
    finally:
        handle.remove()
