"""transformers: `generate` with prompt lookup, and with a draft model (assisted generation)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from lab.side_by_side.protocol import Decode, Decoding, read_setting, serve


def main() -> None:
    setting = read_setting()
    torch.set_num_threads(setting.threads)
    dtype = getattr(torch, setting.dtype)
    model = AutoModelForCausalLM.from_pretrained(setting.target, dtype=dtype).eval()
    systems = {
        "plain": make_decode(model),
        "prompt lookup, 3 tokens": make_decode(model, prompt_lookup_num_tokens=3),
        "prompt lookup, 10 tokens": make_decode(model, prompt_lookup_num_tokens=10),
    }
    if setting.assistant is not None:
        assistant = AutoModelForCausalLM.from_pretrained(setting.assistant, dtype=dtype).eval()
        systems["draft model, default schedule"] = make_decode(model, assistant_model=assistant)
    serve(transformers.__version__, systems)


def make_decode(model: Any, **options: Any) -> Decode:
    def decode(prompt: list[int], tokens: int) -> Decoding:
        inputs = torch.tensor([prompt])
        with count_calls(model) as calls, torch.inference_mode():
            output = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=tokens,
                do_sample=False,
                # No token ends the text.
                eos_token_id=None,
                pad_token_id=0,
                **options,
            )
        # The first call reads the prompt.
        return Decoding(output[0, len(prompt) :].tolist(), len(calls) - 1)

    return decode


@contextmanager
def count_calls(model: Any) -> Iterator[list[int]]:
    """Count the forwards of the model within."""
    calls: list[int] = []
    handle = model.register_forward_hook(lambda *arguments: calls.append(1))
    try:
        yield calls
    finally:
        handle.remove()


if __name__ == "__main__":
    main()
