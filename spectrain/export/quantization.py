"""Exports with quantized weights: what is rounded, and how the files say so.

Weights are rounded to the nearest representable value, so no calibration data is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from spectrain.config.plain_files import read_json_object
from spectrain.config.values import Below1
from spectrain.errors import UserError

from .compressed_tensors import (
    CONFIG_KEY,
    FUSION_MODULE,
    METHOD,
    find_compressor,
    import_library,
)
from .drafter_files import write_json, write_tensors

LAYER_SUFFIX = "_proj.weight"
"""End of the names of the matrices in a drafter's layers."""
HEAD_MODULE = "lm_head"

GROUP_SIZES = (128, 64, 32)
"""Columns that share a scale, which the engines' kernels of 4-bit weights take."""


@dataclass(eq=False)
class WeightQuantization:
    """How an export stores the matrices of a drafter's layers, and how much acceptance that may
    cost."""

    choice: ClassVar[str]  # of `quantize`
    preset: ClassVar[str]  # the library's name of the scheme
    about: ClassVar[str]  # what is stored, as part of a sentence
    takes_groups: ClassVar[bool] = False  # whether groups of columns share a scale

    # Largest share of the tokens per forward that the rounded weights may lose; an export that
    # loses more is refused.
    tolerance: Below1 = 0.02
    # Whether the output layer is quantized, too.
    head: bool = False
    # Whether the layer that fuses the target's states is quantized, too, which SGLang does not
    # read.
    fc: bool = False
    # Number of prompts that are decoded before and after.
    prompts: int = 24
    # Largest number of tokens that are decoded for a prompt.
    max_new_tokens: int = 64
    # With w4a16: columns that share a scale, 128, 64 or 32; null takes the largest that divides
    # the widths of all matrices.
    group_size: int | None = None

    def __post_init__(self) -> None:
        for key, value, least in (
            ("prompts", self.prompts, 2),
            ("max_new_tokens", self.max_new_tokens, 8),
        ):
            if value < least:
                raise UserError(f"quantize.{key}={value}: use {least} or more")
        size = self.group_size
        if size is not None and not self.takes_groups:
            raise UserError(
                f"quantize.group_size={size}: quantize={self.choice} has a scale for each row; "
                "leave it out"
            )
        if size is not None and size not in GROUP_SIZES:
            raise UserError(f"quantize.group_size={size}: use 128, 64, 32 or null")

    def selects(self, name: str) -> bool:
        """Tell whether the tensor of this name is quantized."""
        module = name.removesuffix(".weight").rpartition(".")[2]
        return (
            name.endswith(LAYER_SUFFIX)
            or (self.head and module == HEAD_MODULE)
            or (self.fc and module == FUSION_MODULE)
        )

    @property
    def excluded_modules(self) -> list[str]:
        """The modules that keep their weights although an engine could read them quantized."""
        return ([] if self.head else [HEAD_MODULE]) + ([] if self.fc else [FUSION_MODULE])

    @property
    def ignore_patterns(self) -> list[str]:
        """The modules that keep their weights, as patterns of the library."""
        return [f"re:.*\\b{module}$" for module in self.excluded_modules]

    def make_scheme(self, shapes: Mapping[str, torch.Size]) -> Any:
        """Return the library's scheme for matrices of these shapes by name."""
        # vLLM's output layer is no Linear, so it is named.
        targets = ["Linear", *([f"re:.*\\b{HEAD_MODULE}$"] if self.head else [])]
        scheme = import_library().quantization.preset_name_to_scheme(self.preset, targets)
        if self.takes_groups:
            scheme.weights.group_size = self._choose_group_size(shapes)
        return scheme

    def _choose_group_size(self, shapes: Mapping[str, torch.Size]) -> int:
        sizes = GROUP_SIZES if self.group_size is None else (self.group_size,)
        widths = {name: shape[1] for name, shape in shapes.items()}
        for size in sizes:
            if all(width % size == 0 for width in widths.values()):
                return size
        name, width = next((name, width) for name, width in widths.items() if width % sizes[-1])
        raise UserError(
            f"quantize={self.choice}: {name} has {width} columns, which groups of {sizes[-1]} do "
            "not divide; use quantize=int8"
        )

    def quantize_folder(self, directory: Path) -> list[str]:
        """Quantize the matrices in the files of an export and describe them in config.json; return
        the names of the tensors."""
        path = directory / "model.safetensors"
        tensors = load_file(path)
        names = [name for name in tensors if self.selects(name) and tensors[name].dim() == 2]
        if not names:
            raise UserError(
                f"quantize={self.choice}: {directory} holds no matrix of a layer; export it without"
            )
        scheme = self.make_scheme({name: tensors[name].shape for name in names})
        compressor, scheme.format = find_compressor(scheme)
        for name in names:
            module = name.removesuffix("weight")
            state = compress_weight(tensors.pop(name), scheme, compressor)
            tensors |= {f"{module}{key}": value for key, value in state.items()}
        write_quantized(directory, tensors, scheme, self.ignore_patterns)
        return names


class Int8Weights(WeightQuantization):
    """8-bit integers with a scale for each row; engines round the inputs of these products to 8
    bits, too, each token by its own scale."""

    choice = "int8"
    preset = "W8A8"
    about = "weights and the inputs of their products as 8-bit integers"


class Fp8Weights(WeightQuantization):
    """8-bit floats (e4m3) with a scale for each row; engines round the inputs of these products
    to 8 bits, too, each token by its own scale."""

    choice = "fp8"
    preset = "FP8_DYNAMIC"
    about = "weights and the inputs of their products as 8-bit floats"


class Int4Weights(WeightQuantization):
    """4-bit integers with a scale for each group of columns; inputs keep their type."""

    choice = "w4a16"
    preset = "W4A16"
    about = "weights as 4-bit integers"
    takes_groups = True


def compress_weight(weight: Tensor, scheme: Any, compressor: Any) -> dict[str, Tensor]:
    """Round a matrix [O, D] to the nearest values of a scheme; return the tensors that stand for
    it, by the last part of their names."""
    arguments = scheme.weights
    blocks = weight.float()
    if arguments.group_size is not None:
        blocks = blocks.unflatten(1, (-1, arguments.group_size))
    lowest, highest = blocks.aminmax(dim=-1)
    if arguments.group_size is None:
        # One scale a row: [O, 1].
        lowest, highest = lowest[:, None], highest[:, None]
    utils = import_library().quantization.utils
    scale, zero_point = utils.calculate_qparams(lowest, highest, arguments)
    state = {
        "weight": weight,
        # The type of the scales is that of the weights that they give.
        "weight_scale": scale.to(weight.dtype),
        "weight_zero_point": zero_point,
    }
    compressed: dict[str, Tensor] = compressor.compress(state, scheme)
    return compressed


def write_quantized(
    directory: Path, tensors: dict[str, Tensor], scheme: Any, excluded: list[str]
) -> None:
    """Write the tensors of a quantized export, and its scheme into config.json."""
    library = import_library()
    settings = library.quantization.QuantizationConfig(
        config_groups={"group_0": scheme},
        format=scheme.format,
        ignore=excluded,
        quantization_status=library.quantization.QuantizationStatus.COMPRESSED,
    )
    path = directory / "config.json"
    config = read_json_object(path)
    config[CONFIG_KEY] = json.loads(settings.model_dump_json()) | {
        "quant_method": METHOD,
        "version": library.__version__,
    }
    write_json(path, config)
    write_tensors(directory / "model.safetensors", tensors)
