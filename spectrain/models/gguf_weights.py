"""The weights of a GGUF file, read tensor by tensor into the type that a model computes in.

Of the file, one piece of a tensor is held at a time; of architectures whose tensors are stored in
another order, one tensor.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_SUPPORTED_ARCHITECTURES,
    TENSOR_PROCESSORS,
    Gemma2TensorProcessor,
    LlamaTensorProcessor,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from spectrain.errors import UserError
from spectrain.output.byte_progress import ByteProgress

from .gguf_blocks import dequantize
from .gguf_header import GgufHeader, StoredTensor
from .pretrained import ADVICE, describe_missing

# Values that are dequantised at once: what the steps of that write stays in a processor's cache.
# A multiple of the values of every block.
PIECE_VALUES = 1 << 19
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""The names of types in a safetensors file."""
PROCESSORS = (TensorProcessor, LlamaTensorProcessor, Gemma2TensorProcessor)
"""What transformers does to the values of a tensor, where it makes one weight of one tensor."""


@dataclass(frozen=True)
class WeightPiece:
    """Values of a weight, from the index `start` of its flat form."""

    name: str
    start: int
    values: Tensor


def is_read_here(header: GgufHeader, network: nn.Module) -> bool:
    """Tell whether every weight of a file is one of its tensors, so that it is read here. Others,
    such as those of experts, are read by transformers, which merges them.
    """
    architecture = header.read_text("general.architecture")
    return (
        architecture in GGUF_SUPPORTED_ARCHITECTURES
        and TENSOR_PROCESSORS.get(architecture, TensorProcessor) in PROCESSORS
        and not any(".experts." in name for name, _ in network.named_parameters())
    )


def build_empty_network(config: Any, dtype: torch.dtype) -> Any:
    """Return the causal LM of a configuration with its buffers and without weights."""
    with init_empty_weights(include_buffers=False):
        network = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    network.tie_weights()
    return network


def load_weights(header: GgufHeader, network: Any, dtype: torch.dtype, key: str) -> None:
    """Give an empty network the weights of a file."""
    shapes = {name: weight.shape for name, weight in network.named_parameters()}
    weights = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    for piece in iterate_weights(header, network, dtype, key):
        end = piece.start + piece.values.numel()
        weights[piece.name].view(-1)[piece.start : end] = piece.values
    network.load_state_dict(weights, strict=False, assign=True)
    network.tie_weights()


def save_weights(
    header: GgufHeader, network: Any, dtype: torch.dtype, path: Path, key: str
) -> None:
    """Write the weights of a GGUF file in a type to a safetensors file, without holding them in
    memory. `network` is their empty model.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts = {}
    end = 0
    for name, weight in network.named_parameters():
        starts[name] = end
        end += weight.numel() * dtype.itemsize
        entries[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": [*weight.shape],
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(entries).encode()
    # The data begins at a multiple of eight bytes.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        data_start = file.tell()
        for piece in iterate_weights(header, network, dtype, key):
            file.seek(data_start + starts[piece.name] + piece.start * dtype.itemsize)
            # Numpy has no bfloat16.
            file.write(piece.values.view(torch.uint8).numpy())


def iterate_weights(
    header: GgufHeader, network: Any, dtype: torch.dtype, key: str
) -> Iterator[WeightPiece]:
    """Yield every weight of a network in a type, in pieces, in the order of the file.

    A UserError that begins with `key`, as in target.model, names a weight that the file lacks, or
    has in another shape.
    """
    shapes = {name: weight.shape for name, weight in network.named_parameters()}
    kind = TENSOR_PROCESSORS.get(header.read_text("general.architecture"), TensorProcessor)
    processor = kind(config=network.config.to_dict())
    names = get_gguf_hf_weights_map(network, processor)
    stored = {names[tensor.name]: tensor for tensor in header.tensors if tensor.name in names}
    missing = [name for name in shapes if name not in stored]
    if missing:
        raise UserError(f"{key}={header.path}: {describe_missing(missing)}; {ADVICE}")
    total = sum(shape.numel() for shape in shapes.values()) * dtype.itemsize
    with (
        header.path.open("rb") as file,
        ByteProgress(f"reading {header.path.name}", total) as progress,
    ):
        for name, tensor in stored.items():
            if name not in shapes:
                continue
            if tensor.shape != tuple(shapes[name]):
                raise UserError(
                    f"{key}={header.path}: {name} has the shape {[*tensor.shape]} in it and "
                    f"{[*shapes[name]]} by its keys; {ADVICE}"
                )
            start = 0
            for values in _read_values(file, tensor, processor):
                yield WeightPiece(name, start, values.to(dtype))
                start += values.numel()
                progress.advance(values.numel() * dtype.itemsize)


def _read_values(file: Any, tensor: StoredTensor, processor: Any) -> Iterator[Tensor]:
    """Yield the float32 values of a tensor, flat and in the order of the model: in pieces, or at
    once where the file has them in another order.
    """
    keeps_order = type(processor) is TensorProcessor
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    piece_bytes = PIECE_VALUES // block_values * block_bytes if keeps_order else tensor.num_bytes
    file.seek(tensor.start)
    for start in range(0, tensor.num_bytes, piece_bytes):
        content = bytearray(min(piece_bytes, tensor.num_bytes - start))
        file.readinto(content)
        values = dequantize(torch.frombuffer(content, dtype=torch.uint8), tensor.tensor_type)
        if keeps_order:
            yield values
        else:
            array = values.view(tensor.shape).numpy()
            ordered = processor.process(weights=array, name=tensor.name).weights
            yield torch.from_numpy(ordered).reshape(-1)
