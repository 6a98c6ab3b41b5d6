"""LoRA on the target, through peft: put in, switched off, merged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn

from .target import Target


def inject_lora(target: Target, rank: int, alpha: float) -> list[nn.Parameter]:
    """LoRA (Hu et al., 2022) on every linear of the decoder layers; the parameters that it adds, which start as nothing."""
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear"), target.decoder)
    for layer in lora_layers(target):
        for factors in (layer.lora_A, layer.lora_B):
            factors.float()  # whatever the target's type: small steps would be lost in bfloat16
    return [parameter for name, parameter in target.named_parameters() if ".lora_" in name]


def lora_layers(target: Target) -> list[LoraLayer]:
    return [module for module in target.modules() if isinstance(module, LoraLayer)]


@contextmanager
def adapters_off(target: Target) -> Iterator[None]:
    """The target as it was before it was adapted, bit by bit."""
    layers = lora_layers(target)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merge_lora(target: Target) -> None:
    """Add the adapters to the weights, so that the target is an ordinary model again."""
    for name, module in list(target.named_modules()):
        if isinstance(module, LoraLayer):
            base: nn.Linear = module.get_base_layer()
            with torch.no_grad():  # peft's own merge writes where no copy of the weight would notice
                base.weight.add_(module.get_delta_weight("default").to(base.weight.dtype))
            parent, _, child = name.rpartition(".")
            setattr(target.get_submodule(parent), child, base)


def adapt_target(target: Target, how: Literal["full", "lora"], rank: int, alpha: float) -> list[nn.Parameter]:
    """Get a target ready to be trained; the parameters that will be. Weights that change are kept in float32."""
    if how == "lora":
        return inject_lora(target, rank, alpha)
    cast_parameters(target, torch.float32)
    return list(target.parameters())


def settle_target(target: Target, how: Literal["full", "lora"], dtype: torch.dtype) -> None:
    """The trained target as an ordinary model again, frozen, in the type that it had."""
    if how == "lora":
        merge_lora(target)
    cast_parameters(target, dtype)
    target.requires_grad_(False)


def cast_parameters(target: Target, dtype: torch.dtype) -> None:
    """Change the type of the weights, not of buffers: rotary frequencies rounded to bfloat16 would be another model's."""
    for parameter in target.parameters():
        parameter.data = parameter.data.to(dtype)
