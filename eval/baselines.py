"""What a drafted run is held against: transformers' own `generate`, token by token."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from spectrain.packing import is_packed, pack_linears, unpack_linears
from spectrain.target import ATTENTION, Target

NEAR_TIE = 1e-4


@contextmanager
def plain_model(target: Target) -> Iterator[Any]:
    """The target without anything of ours: transformers' attention and cache, torch's linears."""
    model: Any = target.model
    packed = any(is_packed(module) for module in model.modules())
    unpack_linears(model)
    model.set_attn_implementation("sdpa")
    try:
        yield model
    finally:
        model.set_attn_implementation(ATTENTION)
        if packed:
            pack_linears(model)


def generate(model: Any, prompt: list[int], max_new_tokens: int, stop_ids: frozenset[int], static: bool = False) -> list[int]:
    """The greedy output of transformers' `generate`, EOS included."""
    options: dict[str, Any] = {"cache_implementation": "static", "disable_compile": True} if static else {}
    device = next(model.parameters()).device
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt], device=device), attention_mask=torch.ones(1, len(prompt), device=device, dtype=torch.int64),
            max_new_tokens=max_new_tokens, do_sample=False, repetition_penalty=1.0, temperature=None, top_p=None, top_k=None,
            eos_token_id=sorted(stop_ids), pad_token_id=min(stop_ids, default=0), **options,
        )  # fmt: skip
    return output[0, len(prompt) :].tolist()


@dataclass
class Identity:
    """Whether drafted outputs equal their reference."""

    rule: str
    reference: str
    checked: int = 0
    identical: int = 0
    near_ties: list[dict[str, Any]] = field(default_factory=list)
    differences: list[dict[str, Any]] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        return dict(vars(self))


def first_difference(left: list[int], right: list[int]) -> int | None:
    """The first position at which two outputs differ; None where they are equal."""
    for position, (a, b) in enumerate(zip(left, right)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def logit_gap(target: Target, context: list[int]) -> float:
    """The target's best logit minus its second best after `context`, computed in float64."""
    import copy

    with plain_model(target) as model, torch.inference_mode():
        exact = copy.deepcopy(model).to("cpu", torch.float64)
        logits = exact(torch.tensor([context])).logits[0, -1].double()
    best = logits.topk(2).values
    return float(best[0] - best[1])
