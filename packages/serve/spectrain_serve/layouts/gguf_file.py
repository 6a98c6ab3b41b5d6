"""GGUF, the file format of llama.cpp: one file holds keys and tensors.

Matrices have one of several types, q8_0 and q4_0 with one scale for every 32 numbers of a row.
Tensors of any other rank are float32, which llama.cpp expects of norms, and integers are int64.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from spectrain.errors import UserError, first_line
from spectrain.models.gguf_header import read_gguf_header

TensorType = gguf.GGMLQuantizationType
ValueType = gguf.GGUFValueType
WEIGHT_TYPES = {
    "float32": TensorType.F32,
    "bfloat16": TensorType.BF16,
    "float16": TensorType.F16,
    "q8_0": TensorType.Q8_0,
    "q4_0": TensorType.Q4_0,
}
"""Value of `dtype` -> type of the matrices."""
FILE_TYPES = {
    TensorType.F32: 0,
    TensorType.F16: 1,
    TensorType.Q4_0: 2,
    TensorType.Q8_0: 7,
    TensorType.BF16: 32,
}
"""Type of the matrices -> the number by which general.file_type names it."""
VOCABULARY_KEYS = (
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.merges",
)
"""Keys with a value for every token, or for every merge, which take long to read."""
VALUE_TYPES: dict[type, Any] = {
    bool: ValueType.BOOL,
    int: ValueType.UINT32,
    float: ValueType.FLOAT32,
    str: ValueType.STRING,
}


@dataclass(frozen=True)
class TensorSource:
    """A tensor that is loaded when it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]

    @staticmethod
    def from_tensor(tensor: Tensor) -> TensorSource:
        return TensorSource(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    def stored_type(self, dtype: str | None) -> Any:
        """Return the type to store it in, where matrices have the type `dtype` or, for None,
        their own.
        """
        if not self.dtype.is_floating_point:
            return TensorType.I64
        if len(self.shape) != 2:
            return TensorType.F32
        own = {torch.bfloat16: TensorType.BF16, torch.float16: TensorType.F16}.get(
            self.dtype, TensorType.F32
        )
        chosen = own if dtype is None else WEIGHT_TYPES[dtype]
        block_size, _ = gguf.GGML_QUANT_SIZES[chosen]
        # As llama.cpp does where a row is not a multiple of a block.
        return TensorType.F16 if self.shape[-1] % block_size else chosen


def write_gguf(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, TensorSource],
    dtype: str | None,
) -> None:
    """Write a file with the keys and, one after the other, the tensors; `dtype` is the type of
    the matrices, None their own.
    """
    writer = gguf.GGUFWriter(path, architecture)
    types = {name: source.stored_type(dtype) for name, source in tensors.items()}
    matrices = [types[name] for name, source in tensors.items() if len(source.shape) == 2]
    file_type = FILE_TYPES[max(set(matrices), key=matrices.count)]
    for key, value in {
        "general.type": "model",
        "general.file_type": file_type,
        "general.quantization_version": 2,
    }.items():
        add_value(writer, key, value)
    for key, value in keys.items():
        add_value(writer, key, value)
    for name, source in tensors.items():
        num_bytes = math.prod(gguf.quants.quant_shape_to_byte_shape(source.shape, types[name]))
        writer.add_tensor_info(
            name, source.shape, np.dtype(np.float32), num_bytes, raw_dtype=types[name]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, source in tensors.items():
        writer.write_tensor_data(to_stored_array(source.load(), types[name]))
    writer.close()


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a key, with the type that the value has in Python; numbers of lists are int32, as
    llama.cpp expects them.
    """
    if not isinstance(value, list):
        writer.add_key_value(key, value, VALUE_TYPES[type(value)])
    elif value:
        item_type = ValueType.INT32 if type(value[0]) is int else VALUE_TYPES[type(value[0])]
        writer.add_key_value(key, value, ValueType.ARRAY, item_type)


def to_stored_array(tensor: Tensor, stored: Any) -> np.ndarray[Any, Any]:
    """Return a tensor's data as the file holds it."""
    if stored == TensorType.I64:
        return np.ascontiguousarray(tensor.to(torch.int64).numpy())
    values = np.ascontiguousarray(tensor.float().numpy())
    array: np.ndarray[Any, Any] = (
        values if stored == TensorType.F32 else gguf.quants.quantize(values, stored)
    )
    return array


def find_gguf(directory: Path) -> Path:
    """Return the GGUF file of a directory; raise UserError where it holds several."""
    paths = sorted(directory.glob("*.gguf"))
    if len(paths) != 1:
        raise UserError(
            f"{directory}: it holds {len(paths)} .gguf files; give a directory with the drafter's "
            "file alone"
        )
    return paths[0]


def open_gguf(path: Path) -> Any:
    """Open a file for reading; raise UserError where it is no GGUF file or is cut off."""
    read_gguf_header(path)
    try:
        return gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError, TypeError, struct.error) as error:
        raise UserError(
            f"{path}: it cannot be read ({first_line(error)}); copy the file again"
        ) from error


def read_weight_type(path: Path) -> str:
    """Return the type of most matrices of a file, by the names that `dtype` takes or by
    llama.cpp's, such as q4_1.
    """
    number = int(read_keys(open_gguf(path)).get("general.file_type", 0))
    names = {FILE_TYPES[stored]: name for name, stored in WEIGHT_TYPES.items()}
    return names.get(number) or gguf.LlamaFileType(number).name.removeprefix("MOSTLY_").lower()


def read_keys(reader: Any, with_vocabulary: bool = False) -> dict[str, Any]:
    """Return the keys of an open file, those with a value for every token only on request."""
    names = [
        name
        for name in reader.fields
        if not name.startswith("GGUF.") and (with_vocabulary or name not in VOCABULARY_KEYS)
    ]
    return {name: read_value(reader.fields[name]) for name in names}


def read_value(field: Any) -> Any:
    """Return the value of a key; a float32 is the shortest decimal number that rounds to it."""
    value = field.contents()
    return float(str(np.float32(value))) if field.types == [ValueType.FLOAT32] else value


def read_tensors(reader: Any) -> dict[str, Tensor]:
    """Return the tensors of an open file. Matrices in blocks are dequantized to float32.

    Float32 tensors of another rank take the type of the matrices where that changes no value, as
    before they were written.
    """
    tensors = {tensor.name: read_tensor(tensor) for tensor in reader.tensors}
    dtypes = [
        tensor.dtype
        for tensor in tensors.values()
        if tensor.dim() == 2 and tensor.is_floating_point()
    ]
    common = max(set(dtypes), key=dtypes.count) if dtypes else torch.float32
    for name, tensor in tensors.items():
        rounded = tensor.to(common)
        if (
            tensor.is_floating_point()
            and tensor.dim() != 2
            and torch.equal(rounded.to(tensor.dtype), tensor)
        ):
            tensors[name] = rounded
    return tensors


def read_tensor(tensor: Any) -> Tensor:
    """Return a tensor of an open file in the type that it has, or dequantized to float32."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    if tensor.tensor_type == TensorType.BF16:
        return (
            torch.from_numpy(np.array(tensor.data).view(np.int16))
            .view(torch.bfloat16)
            .reshape(shape)
        )
    if tensor.tensor_type in (TensorType.F32, TensorType.F16, TensorType.I64):
        return torch.from_numpy(np.array(tensor.data)).reshape(shape)
    return torch.from_numpy(
        gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    ).reshape(shape)
