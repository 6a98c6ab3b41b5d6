"""The target without anything of ours: what ours is held against."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .attention import ATTENTION
from .prepacked import is_packed, pack_linears, unpack_linears
from .target import Target


@contextmanager
def plain_model(target: Target) -> Iterator[Any]:
    """The target without anything of ours: transformers' attention and cache, torch's linears."""
    model: Any = target.model
    packed = any(is_packed(module) for module in model.modules())
    unpack_linears(model)
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")  # as generate would find it
    try:
        yield model
    finally:
        model.set_attn_implementation(ATTENTION)
        if packed:
            pack_linears(model)


def generate(
    model: Any, prompt: list[int], max_new_tokens: int, stop_ids: frozenset[int], static: bool = False, **options: Any
) -> list[int]:
    """The greedy output of transformers' `generate`, EOS included; `options` are its own."""
    if static:
        options |= {"cache_implementation": "static", "disable_compile": True}
    device = next(model.parameters()).device
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt], device=device), attention_mask=torch.ones(1, len(prompt), device=device, dtype=torch.int64),
            max_new_tokens=max_new_tokens, do_sample=False, repetition_penalty=1.0, temperature=None, top_p=None, top_k=None,
            eos_token_id=sorted(stop_ids), pad_token_id=min(stop_ids, default=0), **options,
        )  # fmt: skip
    return output[0, len(prompt) :].tolist()
