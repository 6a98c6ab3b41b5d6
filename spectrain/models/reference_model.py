"""The target without any change by this project: the reference in every comparison."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from spectrain.data.image_processor import get_images
from spectrain.kernels.dispatch import run_on_cpu

from .fast import is_packed, pack_linears, paired_forwards, unpack_linears
from .forward_override import override_forwards
from .kv_cache import attention_dtype
from .model_parts import find_decoder, find_layers
from .target import Target

EXACT_SDPA = "sdpa_exact"


def _sdpa_exact(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Call transformers' SDPA; single tokens attend as they do in spectrain: by its kernel, or
    in float64, rounded once.
    """
    if query.shape[2] > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    limits = kwargs.get("softcap"), kwargs.get("s_aux")
    single = run_on_cpu("attend_token", query, key, value, attention_mask, scale, *limits)
    if single is not None:
        return single.transpose(1, 2), None
    attended, _ = sdpa_attention_forward(
        module, query.double(), key.double(), value.double(), attention_mask, *args, **kwargs
    )
    return attended.to(query.dtype), None


AttentionInterface.register(EXACT_SDPA, _sdpa_exact)
AttentionMaskInterface.register(EXACT_SDPA, sdpa_mask)


@contextmanager
def reference_model(target: Target) -> Iterator[Any]:
    """Yield the unmodified target: transformers' attention and cache, torch's linears. In half
    precision on a CPU single tokens attend in the order of sums of this project, and a single row
    is multiplied as a pair where one alone has other bits."""
    model: Any = target.model
    architecture = target.architecture
    is_paired = target.dtype == torch.bfloat16 and target.device.type == "cpu"
    packed = any(is_packed(module) for module in model.modules())
    unpack_linears(model)
    architecture.set_attention(model, _reference_attention(target))
    try:
        with override_forwards(paired_forwards(model) if is_paired else ()):
            yield model
    finally:
        architecture.set_attention(model, architecture.attention_name)
        if packed:
            pack_linears(model)


@contextmanager
def compute_in_float64(model: Any, layer_by_layer: bool = True) -> Iterator[None]:
    """Let a model compute in float64 while the context is open.

    Layer by layer, weights are converted when they are needed: all of them at once take four times
    the memory of a model in bfloat16.
    """
    experts = getattr(model.config, "_experts_implementation", None)
    # The faster implementations of experts have no float64.
    model.set_experts_implementation("eager")
    layers = find_layers(find_decoder(model)) if layer_by_layer else [model]
    groups = [[*layer.modules()] for layer in layers or ()]
    inside = {id(module) for group in groups for module in group}
    groups += [[module] for module in model.modules() if id(module) not in inside]
    try:
        with ExitStack() as hooks:
            for group in groups:
                for hook in _convert_while_running(group):
                    hooks.enter_context(hook)
            yield
    finally:
        if experts is not None:
            model.set_experts_implementation(experts)


def _convert_while_running(modules: Sequence[nn.Module]) -> list[Any]:
    """Register hooks that hold the tensors of modules in float64 while the first of them, which
    calls the others, runs.
    """
    first = modules[0]
    if isinstance(first, nn.Embedding):
        # Its rows are converted, which are fewer than its weights.
        return [first.register_forward_hook(lambda module, args, output: output.double())]
    originals: list[tuple[dict[str, Any], str, Tensor]] = []

    def convert(*args: Any) -> None:
        for module in modules:
            tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
            for table in tables:
                for name, tensor in table.items():
                    if tensor is not None and tensor.is_floating_point():
                        originals.append((table, name, tensor))
                        table[name] = _convert(tensor)

    def restore(*args: Any) -> None:
        while originals:
            table, name, tensor = originals.pop()
            table[name] = tensor

    return [
        first.register_forward_pre_hook(convert),
        first.register_forward_hook(restore, always_call=True),
    ]


def _convert(tensor: Tensor) -> Tensor:
    exact = tensor.detach().double()
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(exact, requires_grad=False) if is_parameter else exact


def _reference_attention(target: Target) -> str:
    """Return the attention that transformers would choose; on a CPU in half precision, the one
    of `_sdpa_exact`.
    """
    if not target.model._supports_sdpa:
        return "eager"
    is_exact = (
        target.architecture.attends_by_masks
        or attention_dtype(target.dtype, target.device) == target.dtype
    )
    return "sdpa" if is_exact else EXACT_SDPA


def generate(
    model: Any,
    prompt: list[int],
    max_new_tokens: int,
    stop_ids: frozenset[int],
    static: bool = False,
    **options: Any,
) -> list[int]:
    """Return the greedy output of transformers' `generate`, EOS included; `options` are its own.
    The prompt carries its images."""
    if static:
        options |= {"cache_implementation": "static", "disable_compile": True}
    device = next(model.parameters()).device
    images = get_images(prompt)
    options |= {} if images is None else images.model_inputs(len(prompt), model)
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt], device=device),
            attention_mask=torch.ones(1, len(prompt), device=device, dtype=torch.int64),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            repetition_penalty=1.0,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=sorted(stop_ids),
            pad_token_id=min(stop_ids, default=0),
            **options,
        )
    return output[0, len(prompt) :].tolist()
