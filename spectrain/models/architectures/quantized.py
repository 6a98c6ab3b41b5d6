"""Targets with quantized weights, by the methods of transformers: as a checkpoint stores them, or
quantized while loading.

The quantized model is the target: drafts are verified with it, and the output is its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spectrain.errors import UserError

Quantization = Literal["8bit", "4bit", "int8", "gguf", "gguf_int8"]
"""The quantization of loaded weights: bitsandbytes in 8 bits (LLM.int8) or 4 (NF4), torchao as
8-bit integers, which are multiplied in the type of the model, or the blocks of a GGUF file, whose
inputs may be rounded to 8 bits."""
BLOCK_QUANTIZATIONS = ("gguf", "gguf_int8")
"""Those that keep the blocks of a GGUF file."""

METHOD_PACKAGES = {
    "gptq": "optimum gptqmodel",
    "awq": "gptqmodel",
    "compressed-tensors": "compressed-tensors loguru",
    "quanto": "optimum-quanto",
    "mxfp4": "triton kernels",
    "fbgemm_fp8": "fbgemm-gpu",
}
"""The packages that transformers needs for a method, where they are not named as the method is."""
NF4_BLOCK_SIZE = 64  # weights per scale
DEQUANTIZED_METHODS = ("fp8", "mxfp4", "compressed-tensors")
"""Methods whose weights may be dequantized while they are loaded."""
MERGEABLE_METHODS = ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit", "torchao")
"""Methods to whose weights adapters can be added permanently."""


def _bnb_8bit_config() -> Any:
    from transformers import BitsAndBytesConfig

    # bitsandbytes logs a cast at every product.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # No column is treated as an outlier. Outliers are chosen over all rows of a product, so the
    # logits of a token would depend on the other rows of its batch.
    return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)


def _bnb_4bit_config(dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )


def _torchao_config() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


QUANTIZERS: dict[str, tuple[str, Callable[[torch.dtype], Any]]] = {
    "8bit": ("bitsandbytes", lambda dtype: _bnb_8bit_config()),
    "4bit": ("bitsandbytes", _bnb_4bit_config),
    "int8": ("torchao", lambda dtype: _torchao_config()),
}


def quantization_method(config: Any) -> str | None:
    """Return the method by which the weights of a model are quantized; None where they are not."""
    settings = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if settings is None:
        return None
    if isinstance(settings, dict) and (
        settings.get("load_in_4bit") or settings.get("load_in_8bit")
    ):
        return "bitsandbytes"
    method = (
        settings.get("quant_method")
        if isinstance(settings, dict)
        else getattr(settings, "quant_method", None)
    )
    return str(getattr(method, "value", method))


def check_quantization(model: str, config: Any) -> None:
    """Raise a UserError where weights are quantized by a method that transformers does not know,
    as it does itself once it loads them.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    method = quantization_method(config)
    known = {
        name.removesuffix("_4bit").removesuffix("_8bit")
        for name in AUTO_QUANTIZATION_CONFIG_MAPPING
    }
    if method is not None and method not in known:
        raise UserError(
            f"target.model={model}: its config.json says quant_method={method[:60]}, and "
            "transformers knows no such method; correct it, or use another checkpoint"
        )


def quantization_options(
    model: str, config: Any, quantization: Quantization | None, dtype: torch.dtype, device: str
) -> dict[str, Any]:
    """Return the options for `from_pretrained` that say how weights are stored, and on which
    device.
    """
    stored = quantization_method(config)
    if quantization is None:
        return _stored_options(model, stored, device)
    if stored is not None:
        raise UserError(
            f"target.quantization={quantization}: the weights of {model} are already quantized "
            f"({stored}); leave it out"
        )
    package, make = QUANTIZERS[quantization]
    text = config.get_text_config()
    widths = [
        width
        for name in ("hidden_size", "intermediate_size")
        if isinstance(width := getattr(text, name, None), int)
    ]
    if (
        quantization == "4bit"
        and device == "cpu"
        and any(width % NF4_BLOCK_SIZE for width in widths)
    ):
        raise UserError(
            f"target.quantization=4bit: on a CPU layers must be multiples of {NF4_BLOCK_SIZE} "
            f"wide, and those of {model} are {' and '.join(map(str, widths))}; use 8bit"
        )
    try:
        return {"quantization_config": make(dtype), "device_map": {"": device}}
    except ImportError as error:
        raise UserError(
            f"target.quantization={quantization}: its package is missing; run pip install {package}"
        ) from error


def _stored_options(model: str, stored: str | None, device: str) -> dict[str, Any]:
    """Return the options for weights as a checkpoint stores them."""
    options: dict[str, Any] = (
        {} if stored is None or device == "cpu" else {"device_map": {"": device}}
    )
    # Without dequantization, the first call of the complete model unpacks the weights, and here
    # only its decoder is called.
    if stored == "compressed-tensors":
        from transformers import CompressedTensorsConfig

        try:
            options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
        except ImportError as error:
            raise UserError(
                f"target.model={model}: its quantized weights need their package; run pip install "
                "compressed-tensors loguru"
            ) from error
    return options


def cast_dequantized(network: Any, dtype: torch.dtype) -> None:
    """Cast weights that were dequantized, which have the type of their scales or of the file, to
    the requested type.
    """
    float32_modules = {
        *(network._keep_in_fp32_modules or ()),
        *(network._keep_in_fp32_modules_strict or ()),
    }
    for name, weight in network.named_parameters():
        is_dense = type(weight) is nn.Parameter and weight.dtype in (
            torch.float32,
            torch.bfloat16,
            torch.float16,
        )
        if is_dense and not any(part in name for part in float32_modules):
            weight.data = weight.data.to(dtype)


def required_package(config: Any, quantization: Quantization | None) -> str | None:
    """Return the package that the weights of a model need; None where they need none."""
    method = (
        QUANTIZERS[quantization][0] if quantization in QUANTIZERS else quantization_method(config)
    )
    return None if method is None else METHOD_PACKAGES.get(method, method)


def is_quantized(model: nn.Module) -> bool:
    return bool(
        getattr(model, "is_quantized", False) or quantization_method(model.config) is not None
    )


def has_dense_weight(linear: nn.Linear) -> bool:
    """Return whether the weight of a linear is a floating-point tensor that any product can
    read.
    """
    weight = linear.weight
    is_plain = type(weight) in (nn.Parameter, Tensor) or getattr(
        type(weight), "stands_for_plain", False
    )
    return (is_plain or is_in_blocks(weight)) and weight.is_floating_point()


def is_in_blocks(weight: Tensor) -> bool:
    """Return whether an installed package keeps a weight in the blocks of a GGUF file: a tensor
    that any product can read, and that has `first_rows`.
    """
    return bool(getattr(type(weight), "stays_in_blocks", False))


def has_block_weights(model: nn.Module) -> bool:
    """Return whether some weights of a model stay in the blocks of a GGUF file."""
    return any(map(is_in_blocks, model.parameters()))


@torch.no_grad()
def dequantize_weight(linear: nn.Linear, dtype: torch.dtype) -> Tensor:
    """Return the weight [O, D] of a linear, whatever its layout, by multiplying every unit
    vector.
    """
    units = torch.eye(linear.in_features, dtype=dtype, device=linear.weight.device)
    products = linear(units)
    return (products if linear.bias is None else products - linear.bias).T.to(dtype).contiguous()


def refuse_training(name: str, model: nn.Module, adapt: str) -> None:
    """Raise UserError where quantized weights cannot be trained."""
    if has_block_weights(model):
        raise UserError(
            f"target {name}: its weights stay in the blocks of a GGUF file and cannot be trained; "
            "leave out target.quantization"
        )
    if not is_quantized(model):
        return
    method = quantization_method(model.config)
    if adapt != "lora":
        raise UserError(
            f"target {name}: its weights are quantized ({method}) and cannot be trained; use "
            "drafter.adapt=lora"
        )
    if method not in MERGEABLE_METHODS:
        raise UserError(
            f"target {name}: adapters cannot be added to its quantized weights ({method}); train "
            "another target, or load one with target.quantization=4bit"
        )


def clear_quantization(model: Any) -> None:
    """Mark all weights of a model as unquantized again."""
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    for module in model.modules():
        if getattr(module, "hf_quantizer", None) is not None:
            module.hf_quantizer = None
        for name, nothing in (
            ("is_quantized", False),
            ("is_loaded_in_4bit", False),
            ("is_loaded_in_8bit", False),
            ("quantization_method", None),
        ):
            if getattr(module, name, None):
                setattr(module, name, nothing)
