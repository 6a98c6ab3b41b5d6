"""The target without any change by this project: the reference in every comparison."""

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

from .attention import ATTENTION_NAME, attn_implementation_for
from .forward_override import Forward, override_forwards
from .images import get_images
from .kv_cache import attention_dtype
from .masked_attention import MASKED
from .packed_linears import is_batch_invariant, is_packed, multiply_paired, pack_linears, packable_dtypes, unpack_linears
from .quantization import has_dense_weight
from .target import Target

EXACT_SDPA = "sdpa_exact"


def _sdpa_exact(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Call transformers' SDPA; single tokens attend in float64, rounded once."""
    dtype = query.dtype
    if query.shape[2] == 1:
        query, key, value = query.double(), key.double(), value.double()
    return sdpa_attention_forward(module, query, key, value, *args, **kwargs)[0].to(dtype), None


AttentionInterface.register(EXACT_SDPA, _sdpa_exact)
AttentionMaskInterface.register(EXACT_SDPA, sdpa_mask)


@contextmanager
def reference_model(target: Target) -> Iterator[Any]:
    """Yield the unmodified target: transformers' attention and cache, torch's linears. In half precision on a CPU single tokens
    attend in float64, as they do here, and a single row is multiplied as a pair where one alone has other bits."""
    model: Any = target.model
    packed = any(is_packed(module) for module in model.modules())
    unpack_linears(model)
    _set_attention(target, _reference_attention(target))
    try:
        with override_forwards(_paired_overrides(target)):
            yield model
    finally:
        _set_attention(target, ATTENTION_NAME if target.traits.masked_attention is None else MASKED)
        if packed:
            pack_linears(model)


def _paired_overrides(target: Target) -> Iterator[tuple[nn.Module, Forward]]:
    """Yield the bfloat16 linears on a CPU that sum a single row in another order, with forwards that multiply pairs."""
    if target.dtype == torch.bfloat16 and target.device.type == "cpu" and torch.bfloat16 in packable_dtypes():
        for linear in target.model.modules():
            if type(linear) is nn.Linear and has_dense_weight(linear) and not is_batch_invariant(linear.in_features, 1):
                yield linear, partial(_paired_product, linear)


def _paired_product(linear: nn.Linear, input: Tensor) -> Tensor:
    return multiply_paired(input, lambda rows: F.linear(rows, linear.weight, linear.bias))


def _set_attention(target: Target, implementation: str) -> None:
    model: Any = target.model
    if target.traits.masked_attention is None:
        model.set_attn_implementation(attn_implementation_for(model.config, implementation))
    else:  # which transformers would not set, for its code does not ask the interface
        model.config._attn_implementation = implementation


def _reference_attention(target: Target) -> str:
    """Return the attention that transformers would choose; on a CPU in half precision, with single tokens in float64."""
    if not target.model._supports_sdpa:
        return "eager"
    return (
        "sdpa"
        if target.traits.masked_attention is not None or attention_dtype(target.dtype, target.device) == target.dtype
        else EXACT_SDPA
    )


def generate(
    model: Any, prompt: list[int], max_new_tokens: int, stop_ids: frozenset[int], static: bool = False, **options: Any
) -> list[int]:
    """Return the greedy output of transformers' `generate`, EOS included; `options` are its own. The prompt carries its
    images."""
    if static:
        options |= {"cache_implementation": "static", "disable_compile": True}
    device, images = next(model.parameters()).device, get_images(prompt)
    options |= {} if images is None else images.model_inputs(len(prompt), model)
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt], device=device), attention_mask=torch.ones(1, len(prompt), device=device, dtype=torch.int64),
            max_new_tokens=max_new_tokens, do_sample=False, repetition_penalty=1.0, temperature=None, top_p=None, top_k=None,
            eos_token_id=sorted(stop_ids), pad_token_id=min(stop_ids, default=0), **options,
        )  # fmt: skip
    return output[0, len(prompt) :].tolist()
