"""The bytes of a target's weights on a device, as its checkpoint or `target.quantization` stores
them.

A plan builds the target without weights, in the type that products have; quantized weights take
less than this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from torch import Tensor, nn

from spectrain.models.architectures.quantized import DEQUANTIZED_METHODS, quantization_method
from spectrain.models.device import is_experts
from spectrain.models.target import Target


@dataclass(frozen=True)
class WeightFormat:
    """What a method of quantization stores of the decoder layers."""

    # Bits of a weight, with its share of a scale.
    bits: float
    # Whether it quantizes the linear layers, and the stacked weights of experts.
    linears: bool = True
    experts: bool = False


FORMATS = {
    # 8-bit scales of 32 weights.
    "mxfp4": WeightFormat(4 + 8 / 32, linears=False, experts=True),
    # float32 scales of 128 x 128 weights.
    "fp8": WeightFormat(8 + 32 / 128**2, experts=True),
    # float32 scales of 64 weights.
    "4bit": WeightFormat(4 + 32 / 64),
    "8bit": WeightFormat(8),
    "int8": WeightFormat(8),
}
"""The formats whose sizes are computed; weights of others are counted in the type of the
products.
"""


def find_format_name(target: Target, quantization: str | None) -> str | None:
    """Return the name of the format in which a checkpoint, or `target.quantization`, stores
    weights; None where it is dense.
    """
    method = quantization or quantization_method(target.config)
    if method != "bitsandbytes":
        return method
    return "4bit" if _read_settings(target).get("load_in_4bit") else "8bit"


def is_kept_quantized(name: str, on_cpu: bool) -> bool:
    """Tell whether weights stay as they are stored: a CPU, and compressed-tensors everywhere,
    dequantize them.
    """
    return name != "compressed-tensors" and not (on_cpu and name in DEQUANTIZED_METHODS)


def count_weight_bytes(
    target: Target, parameters: Sequence[Tensor], name: str | None, on_cpu: bool
) -> int:
    """Return the bytes that parameters of a target take in the format of this name, of the same
    one once.
    """
    stored = (
        FORMATS.get(name or "") if name is not None and is_kept_quantized(name, on_cpu) else None
    )
    quantized = (
        set()
        if stored is None
        else {id(weight) for weight in find_quantized_weights(target, stored)}
    )
    bits = 0 if stored is None else stored.bits
    sizes = {
        id(p): p.numel() * bits / 8 if id(p) in quantized else count_stored_bytes(p)
        for p in parameters
    }
    return int(sum(sizes.values()))


def count_stored_bytes(parameter: Tensor) -> int:
    """Return the bytes of a dense parameter, or those of one that stays in the blocks of a GGUF
    file.
    """
    num_bytes: int | None = getattr(parameter, "block_bytes", None)
    return parameter.numel() * parameter.element_size() if num_bytes is None else num_bytes


def find_quantized_weights(target: Target, stored: WeightFormat) -> Iterator[Tensor]:
    """Yield the weights of the decoder layers that a format stores, without the modules that the
    checkpoint excludes.
    """
    excluded = _read_settings(target).get("modules_to_not_convert") or ()
    layer_modules = {id(module) for layer in target.layers for module in layer.modules()}
    for name, module in target.model.named_modules():
        if id(module) not in layer_modules or _is_excluded(name, excluded):
            continue
        if stored.linears and isinstance(module, nn.Linear):
            yield module.weight
        if stored.experts and is_experts(module):
            yield from (
                parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3
            )


def _read_settings(target: Target) -> dict[str, Any]:
    """Return the checkpoint's settings of its quantization."""
    for config in (target.config, target.model.config):
        settings = getattr(config, "quantization_config", None)
        if settings is not None:
            return dict(settings if isinstance(settings, dict) else settings.to_dict())
    return {}


def _is_excluded(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether a module, or one that contains it, has a name that a checkpoint excludes."""
    parts = name.split(".")
    names = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(fnmatch(prefix, pattern) for prefix in names for pattern in patterns)
