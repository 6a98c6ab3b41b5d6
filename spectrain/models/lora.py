"""LoRA on the target, through peft: injection, switching off, merging; and what a family trains
of its target.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn

from .architectures.quantized import (
    clear_quantization,
    dequantize_weight,
    has_dense_weight,
    is_quantized,
    refuse_training,
)
from .target import Target


def inject_lora(target: Target, rank: int, alpha: float) -> list[nn.Parameter]:
    """Inject LoRA (Hu et al., 2022) into every linear of the decoder layers and return the new
    parameters, which start as no change.

    Fused experts and their router stay as they are.
    """
    # A module around the decoder, because peft reads the configuration of a transformers model to
    # take the linears of a mixture's shared expert for its fused experts.
    holder = nn.ModuleDict({"decoder": target.decoder})
    linears = [name for name, module in holder.named_modules() if is_adaptable(module)]
    inject_adapter_in_model(
        LoraConfig(r=rank, lora_alpha=alpha, target_modules=linears or "all-linear"), holder
    )
    for layer in find_lora_layers(target):
        for factors in (layer.lora_A, layer.lora_B):
            # bfloat16 would lose small steps.
            factors.float()
    return [parameter for name, parameter in target.named_parameters() if ".lora_" in name]


def is_adaptable(module: nn.Module) -> bool:
    """Return whether LoRA can add to the output of a module: a linear, but no router of experts.

    The routers that `transformers` derives from a linear return a tuple.
    """
    return isinstance(module, nn.Linear) and not type(module).__name__.endswith("Router")


def find_lora_layers(model: nn.Module) -> list[LoraLayer]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


@contextmanager
def disable_adapters(target: Target) -> Iterator[None]:
    """Restore the target as it was before adaptation, bit by bit, while the context is open."""
    layers = find_lora_layers(target)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def dequantize_linear(linear: nn.Linear, dtype: torch.dtype) -> nn.Linear:
    """Return a linear with the same weights, dequantized."""
    weight = dequantize_weight(linear, dtype)
    dense = nn.Linear(
        linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta"
    )
    dense.weight = nn.Parameter(weight, requires_grad=False)
    if linear.bias is not None:
        dense.bias = nn.Parameter(linear.bias.detach().to(dtype), requires_grad=False)
    return dense


def merge_lora(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Merge the adapters of a target or a drafter into its weights, so that it is an ordinary model
    again. Quantized weights are dequantized to `dtype` first, because rounding would remove what
    was learned."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            base: nn.Linear = module.get_base_layer()
            # peft's own merge writes through `.data`, which copies of the weight would not notice.
            with torch.no_grad():
                if not has_dense_weight(base):
                    base = dequantize_linear(base, dtype)
                base.weight.add_(module.get_delta_weight("default").to(base.weight.dtype))
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, base)


class TargetTraining:
    """What a family trains of its target: all weights (`adapt` full), or LoRA adapters in its
    layers (lora).

    With `keeps_original`, a target whose weights change is copied first, so that `use_original` can
    restore its output.
    """

    def __init__(
        self, adapt: Literal["full", "lora"], rank: int, alpha: float, keeps_original: bool = False
    ) -> None:
        self.adapt = adapt
        self.rank = rank
        self.alpha = alpha
        self.keeps_original = keeps_original
        self.parameters: list[nn.Parameter] = []  # trainable parameters of the target
        self.original: Target | None = None

    def start_training(self, target: Target) -> None:
        """Prepare a target for training. Weights that change are held in float32."""
        target.require_layers("a drafter that trains the target")
        refuse_training(target.name, target.model, self.adapt)
        self.dtype = target.dtype
        if self.adapt == "lora":
            self.parameters = inject_lora(target, self.rank, self.alpha)
            return
        if self.keeps_original:
            self.original = copy.deepcopy(target)
            self.original.pack_weights()
        cast_parameters(target, torch.float32)
        self.parameters = list(target.parameters())

    @contextmanager
    def use_original(self, target: Target) -> Iterator[Target]:
        """Yield the target as it was before training."""
        if self.adapt == "full":
            assert self.original is not None, "the original weights were not stored"
            yield self.original
            return
        with disable_adapters(target):
            yield target

    def finish_training(self, target: Target) -> None:
        """Make the trained target an ordinary model again: frozen, in its original type."""
        if self.adapt == "lora":
            merge_lora(target, target.dtype)
            if is_quantized(target.model):
                clear_quantization(target.model)
        cast_parameters(target, self.dtype)
        target.requires_grad_(False)
        self.parameters = []
        self.original = None


def cast_parameters(target: Target, dtype: torch.dtype) -> None:
    """Cast the weights but not the buffers: rotary frequencies rounded to bfloat16 would change
    the model.
    """
    for parameter in target.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
