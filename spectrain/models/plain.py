"""The target without anything of ours: what ours is held against."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from .attention import ATTENTION, attending_by
from .images import images_of
from .kv_cache import attended_dtype
from .own_attention import OWN
from .prepacked import in_company, is_packed, pack_linears, packable, sums_alike, unpack_linears
from .quantization import is_plain_weight
from .replaced_forward import Forward, replaced
from .target import Target

EXACT = "sdpa_exact"


def _sdpa_exact(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """transformers' sdpa; of single tokens in float64, rounded once."""
    dtype = query.dtype
    if query.shape[2] == 1:
        query, key, value = query.double(), key.double(), value.double()
    return sdpa_attention_forward(module, query, key, value, *args, **kwargs)[0].to(dtype), None


AttentionInterface.register(EXACT, _sdpa_exact)
AttentionMaskInterface.register(EXACT, sdpa_mask)


@contextmanager
def plain_model(target: Target) -> Iterator[Any]:
    """The target without anything of ours: transformers' attention and cache, torch's linears. In half precision on a CPU
    single tokens attend in float64, as they do here, and are multiplied `in_company` where one alone has other bits."""
    model: Any = target.model
    packed = any(is_packed(module) for module in model.modules())
    unpack_linears(model)
    _attend_by(target, _as_generate_finds_it(target))
    try:
        with replaced(_in_company(target)):
            yield model
    finally:
        _attend_by(target, ATTENTION if target.attending.own is None else OWN)
        if packed:
            pack_linears(model)


def _in_company(target: Target) -> Iterator[tuple[nn.Module, Forward]]:
    """Those linears of a target in bfloat16 on a CPU that add a single row up in an order of its own."""
    if target.dtype == torch.bfloat16 and target.device.type == "cpu" and torch.bfloat16 in packable():
        for linear in target.model.modules():
            if type(linear) is nn.Linear and is_plain_weight(linear) and not sums_alike(linear.in_features, 1):
                yield linear, partial(_product_in_company, linear)


def _product_in_company(linear: nn.Linear, input: Tensor) -> Tensor:
    return in_company(input, lambda rows: F.linear(rows, linear.weight, linear.bias))


def _attend_by(target: Target, implementation: str) -> None:
    model: Any = target.model
    if target.attending.own is None:
        model.set_attn_implementation(attending_by(model.config, implementation))
    else:  # which transformers would not set, for its code does not ask the interface
        model.config._attn_implementation = implementation


def _as_generate_finds_it(target: Target) -> str:
    """The attention that transformers would choose for a model; on a CPU in half precision with single tokens in float64."""
    if not target.model._supports_sdpa:
        return "eager"
    return "sdpa" if target.attending.own is not None or attended_dtype(target.dtype, target.device) == target.dtype else EXACT


def generate(
    model: Any, prompt: list[int], max_new_tokens: int, stop_ids: frozenset[int], static: bool = False, **options: Any
) -> list[int]:
    """The greedy output of transformers' `generate`, EOS included; `options` are its own. Images come with the prompt."""
    if static:
        options |= {"cache_implementation": "static", "disable_compile": True}
    device, images = next(model.parameters()).device, images_of(prompt)
    options |= {} if images is None else images.inputs(len(prompt), model)
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt], device=device), attention_mask=torch.ones(1, len(prompt), device=device, dtype=torch.int64),
            max_new_tokens=max_new_tokens, do_sample=False, repetition_penalty=1.0, temperature=None, top_p=None, top_k=None,
            eos_token_id=sorted(stop_ids), pad_token_id=min(stop_ids, default=0), **options,
        )  # fmt: skip
    return output[0, len(prompt) :].tolist()
