"""LoRA on the target, through peft: put in, switched off, merged; and what a family trains of its target."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn

from .quantization import clear_quantization, dequantize_weight, has_dense_weight, is_quantized, refuse_training
from .target import Target


def inject_lora(target: Target, rank: int, alpha: float) -> list[nn.Parameter]:
    """LoRA (Hu et al., 2022) on every linear of the decoder layers; the parameters that it adds, which start as nothing.

    Experts that are one weight together, and their router, are no linears and stay as they are.
    """
    linears = [name for name, module in target.decoder.named_modules() if isinstance(module, nn.Linear)]
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=linears or "all-linear"), target.decoder)
    for layer in find_lora_layers(target):
        for factors in (layer.lora_A, layer.lora_B):
            factors.float()  # whatever the target's type: small steps would be lost in bfloat16
    return [parameter for name, parameter in target.named_parameters() if ".lora_" in name]


def find_lora_layers(target: Target) -> list[LoraLayer]:
    return [module for module in target.modules() if isinstance(module, LoraLayer)]


@contextmanager
def disable_adapters(target: Target) -> Iterator[None]:
    """The target as it was before it was adapted, bit by bit."""
    layers = find_lora_layers(target)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def dequantize_linear(linear: nn.Linear, dtype: torch.dtype) -> nn.Linear:
    """A linear of the same weights, which are kept in few bits no longer."""
    weight = dequantize_weight(linear, dtype)
    found = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    found.weight = nn.Parameter(weight, requires_grad=False)
    if linear.bias is not None:
        found.bias = nn.Parameter(linear.bias.detach().to(dtype), requires_grad=False)
    return found


def merge_lora(target: Target) -> None:
    """Add the adapters to the weights, so that the target is an ordinary model again; quantised ones become whole, for in few
    bits what was learnt would be rounded away."""
    for name, module in list(target.named_modules()):
        if isinstance(module, LoraLayer):
            base: nn.Linear = module.get_base_layer()
            with torch.no_grad():  # peft's own merge writes where no copy of the weight would notice
                if not has_dense_weight(base):
                    base = dequantize_linear(base, target.dtype)
                base.weight.add_(module.get_delta_weight("default").to(base.weight.dtype))
            parent, _, child = name.rpartition(".")
            setattr(target.get_submodule(parent), child, base)


class TargetTraining:
    """What a family trains of its target: all weights (`adapt` full), or LoRA adapters in its layers (lora).

    With `keeps_original`, a target whose weights change is copied first, so that `off` can say what it said before.
    """

    def __init__(self, adapt: Literal["full", "lora"], rank: int, alpha: float, keeps_original: bool = False) -> None:
        self.adapt, self.rank, self.alpha, self.keeps_original = adapt, rank, alpha, keeps_original
        self.parameters: list[nn.Parameter] = []  # of the target, that learn
        self.original: Target | None = None

    def start_training(self, target: Target) -> None:
        """Get a target ready to be trained. Weights that change are kept in float32."""
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
        """The target as it was before it was trained."""
        if self.adapt == "full":
            assert self.original is not None, "weights that changed are only known where the original was kept"
            yield self.original
            return
        with disable_adapters(target):
            yield target

    def finish_training(self, target: Target) -> None:
        """The trained target as an ordinary model again, frozen, in the type that it had."""
        if self.adapt == "lora":
            merge_lora(target)
            if is_quantized(target.model):
                clear_quantization(target.model)
        cast_parameters(target, self.dtype)
        target.requires_grad_(False)
        self.parameters, self.original = [], None


def cast_parameters(target: Target, dtype: torch.dtype) -> None:
    """Change the type of the weights, not of buffers: rotary frequencies rounded to bfloat16 would be another model's."""
    for parameter in target.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
