"""Quantized weights in files, in the form of the compressed-tensors library, which vLLM and SGLang
read.

This library writes and reads them, and nothing else of the format is known here. The files hold a
matrix `NAME.weight` [O, D] as integers or 8-bit floats with their scales; everything else keeps its
type. Reading them gives the rounded weights as ordinary ones: all commands decode with those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from spectrain.errors import UserError, first_line

CONFIG_KEY = "quantization_config"
METHOD = "compressed-tensors"
FUSION_MODULE = "fc"
"""Module that fuses the target's states."""
SCHEME_NAMES: dict[Any, str] = {
    (8, "int", True): "int8",
    (4, "int", False): "w4a16",
    (8, "float", True): "fp8",
}
"""Bits and type of the weights, and whether inputs are rounded -> the choice of `quantize`."""


def import_library() -> Any:
    """Return the compressed-tensors library with the parts that are used here; raise a UserError
    where it is missing."""
    try:
        import compressed_tensors
        import compressed_tensors.compressors
        import compressed_tensors.quantization
        import compressed_tensors.quantization.utils
    except ImportError as error:
        raise UserError(
            f"quantized weights need the library {METHOD} ({first_line(error)}); run pip install "
            "'spectrain[compressed]'"
        ) from error
    return compressed_tensors


def find_compressor(scheme: Any) -> tuple[Any, str]:
    """Return the library's class for the matrices of a scheme, and its name."""
    library = import_library()
    name = scheme.format or library.compressors.format.infer_module_format(nn.Linear, scheme)
    name = getattr(name, "value", name)
    return library.compressors.BaseCompressor.get_value_from_registry(name), name


def read_quantized(
    tensors: dict[str, Tensor], settings: Any, path: Path
) -> tuple[dict[str, Tensor], list[str]]:
    """Return a drafter's tensors with ordinary weights in place of quantized ones, and the names
    of these weights; raise a UserError where the files hold something else than `settings` say."""
    scheme = read_scheme(settings, path)
    compressor, _ = find_compressor(scheme)
    keys = compressor.compression_param_names(scheme)
    plain = dict(tensors)
    names = []
    for module in list_quantized(tensors):
        missing = [key for key in keys if f"{module}{key}" not in tensors]
        if missing:
            raise UserError(f"{path}: {module}{missing[0]} is missing; copy the files again")
        state = {key: plain.pop(f"{module}{key}") for key in keys}
        try:
            weight = compressor.decompress(state, scheme)["weight"]
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise UserError(
                f"{path}: {module}weight does not fit its scales ({first_line(error)}); copy the "
                "files again"
            ) from error
        names.append(f"{module}weight")
        plain[names[-1]] = weight.to(state["weight_scale"].dtype)
    return plain, names


def list_quantized(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the quantized modules, each with the point that ends it."""
    for name in sorted(tensors):
        if name.endswith(".weight_scale"):
            yield name.removesuffix("weight_scale")


def read_scheme(settings: Any, path: Path) -> Any:
    """Return the library's scheme that config.json describes; raise a UserError where it is none
    that is read here."""
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method != METHOD:
        raise UserError(
            f"{path}: its weights are quantized by {str(method)[:100]}, and only {METHOD} is read; "
            "take the drafter before it was quantized"
        )
    library = import_library()
    try:
        config = library.quantization.QuantizationConfig.model_validate(settings)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UserError(
            f"{path}: {CONFIG_KEY} is not what {METHOD} writes ({first_line(error)}); copy the "
            "file again"
        ) from error
    schemes = list(config.config_groups.values())
    if len(schemes) != 1 or getattr(schemes[0], "weights", None) is None:
        raise UserError(
            f"{path}: {CONFIG_KEY} has {len(schemes)} groups, and files of one group are read; "
            "take the drafter before it was quantized"
        )
    if schemes[0].format is None and config.format not in (None, "dense"):
        schemes[0].format = config.format
    return schemes[0]


def name_scheme(settings: Mapping[str, Any]) -> str:
    """Return the choice of `quantize` that config.json describes, or the library's own words for
    another one."""
    groups = settings.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    group = group if isinstance(group, dict) else {}
    weights = group.get("weights") or {}
    kind = (weights.get("num_bits"), weights.get("type"), bool(group.get("input_activations")))
    return SCHEME_NAMES.get(kind, f"{kind[0]}-bit {kind[1]}")
