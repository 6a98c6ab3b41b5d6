"""The weights of a GGUF file, read tensor by tensor into the type that a model computes in.

Of the file, one piece of a tensor is held at a time; of architectures whose tensors are stored in
another order, one tensor.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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
)

from spectrain.errors import UserError
from spectrain.kernels.dispatch import run_on_cpu
from spectrain.output.count_progress import CountProgress

from .gguf_blocks import dequantize
from .gguf_header import GgufHeader, StoredTensor
from .pretrained import ADVICE, describe_missing

# Values that are dequantised at once: what the steps of that write stays in a processor's cache.
# A multiple of the values of every block.
PIECE_VALUES = 1 << 18
Item = TypeVar("Item")
Result = TypeVar("Result")
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
        and architecture in gguf.MODEL_ARCH_NAMES.values()
        and TENSOR_PROCESSORS.get(architecture, TensorProcessor) in PROCESSORS
        and not any(".experts." in name for name, _ in network.named_parameters())
    )


def map_names(architecture: str, network: Any) -> dict[str, str]:
    """Return the names of a network's weights by those that files of an architecture have for them.
    transformers' own map takes 25 seconds for 28 layers.
    """
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    stored_names = gguf.get_tensor_name_map(number, network.config.num_hidden_layers)
    names = {}
    for name, _ in network.named_parameters():
        module, _, suffix = name.rpartition(".")
        stored = stored_names.get_name(module)
        if stored is not None:
            names[f"{stored}.{suffix}"] = name
    return names


def build_empty_network(config: Any, dtype: torch.dtype) -> Any:
    """Return the causal LM of a configuration with its buffers and without weights."""
    with init_empty_weights(include_buffers=False):
        network = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    network.tie_weights()
    return network


def fill_weights(weights: dict[str, Any], pieces: Iterator[WeightPiece]) -> None:
    """Copy pieces into weights of their names."""
    for piece in pieces:
        end = piece.start + piece.values.numel()
        weights[piece.name].view(-1)[piece.start : end] = piece.values


def load_weights(header: GgufHeader, network: Any, dtype: torch.dtype, key: str) -> None:
    """Give an empty network the weights of a file."""
    shapes = {name: weight.shape for name, weight in network.named_parameters()}
    weights = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    fill_weights(weights, iterate_weights(header, network, dtype, key))
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
            content: Any = piece.values.view(torch.uint8).numpy()
            file.write(content)


def iterate_weights(
    header: GgufHeader, network: Any, dtype: torch.dtype, key: str
) -> Iterator[WeightPiece]:
    """Yield every weight of a network in a type, in pieces, in the order of the file.

    A UserError that begins with `key`, as in target.model, names a weight that the file lacks, or
    has in another shape.
    """
    stored = match_tensors(header, network, key)
    yield from read_weights(header, network, stored, dtype)


def match_tensors(header: GgufHeader, network: Any, key: str) -> dict[str, StoredTensor]:
    """Return the tensors of a file by the names that its weights have in a network."""
    shapes = {name: weight.shape for name, weight in network.named_parameters()}
    names = map_names(header.read_text("general.architecture"), network)
    stored = {names[tensor.name]: tensor for tensor in header.tensors if tensor.name in names}
    missing = [name for name in shapes if name not in stored]
    if missing:
        raise UserError(f"{key}={header.path}: {describe_missing(missing)}; {ADVICE}")
    for name, tensor in stored.items():
        if name in shapes and tensor.shape != tuple(shapes[name]):
            raise UserError(
                f"{key}={header.path}: {name} has the shape {[*tensor.shape]} in it and "
                f"{[*shapes[name]]} by its keys; {ADVICE}"
            )
    return {name: tensor for name, tensor in stored.items() if name in shapes}


def find_processor(header: GgufHeader, network: Any) -> Any:
    """Return what transformers does to the values of a file's tensors."""
    architecture = header.read_text("general.architecture")
    kind = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    return kind(config=network.config.to_dict())


def read_weights(
    header: GgufHeader, network: Any, stored: dict[str, StoredTensor], dtype: torch.dtype
) -> Iterator[WeightPiece]:
    """Yield the values of tensors, by the names of their weights, in pieces."""
    processor = find_processor(header, network)
    parts = [
        (name, part)
        for name, tensor in stored.items()
        for part in list_parts(tensor, in_pieces=type(processor) is TensorProcessor)
    ]
    total = sum(math.prod(tensor.shape) for tensor in stored.values()) * dtype.itemsize

    with (
        header.path.open("rb") as file,
        CountProgress(f"reading {header.path.name}", total) as progress,
    ):

        def read(named: tuple[str, TensorPart]) -> WeightPiece:
            name, part = named
            values = part.read_values(file.fileno(), processor).to(dtype)
            return WeightPiece(name, part.first_value, values)

        for piece in run_ahead(read, parts):
            yield piece
            progress.advance(piece.values.nbytes)


def has_block_kernel(tensor: StoredTensor) -> bool:
    """Return whether an installed package multiplies a tensor in the blocks of its file."""
    return count_block_bytes(tensor) is not None


def count_block_bytes(tensor: StoredTensor) -> int | None:
    """Return the bytes of memory of a tensor in blocks; None where it is made dense."""
    if len(tensor.shape) != 2:
        return None
    num_bytes: int | None = run_on_cpu("block_bytes", *tensor.shape, tensor.tensor_type)
    return num_bytes


@dataclass(frozen=True)
class TensorPart:
    """Consecutive blocks of a tensor in a file."""

    tensor: StoredTensor
    first_value: int
    start: int  # from the beginning of the file
    num_bytes: int

    def read_values(self, file: int, processor: Any) -> Tensor:
        """Return the float32 values, flat and in the order of the model. What `processor` moves,
        it moves within a tensor.
        """
        content = bytearray(os.pread(file, self.num_bytes, self.start))
        values = dequantize(torch.frombuffer(content, dtype=torch.uint8), self.tensor.tensor_type)
        if type(processor) is TensorProcessor:
            return values
        array = values.view(self.tensor.shape).numpy()
        ordered = processor.process(weights=array, name=self.tensor.name).weights
        return torch.from_numpy(ordered).reshape(-1)


def list_parts(tensor: StoredTensor, in_pieces: bool) -> list[TensorPart]:
    """Return the parts of a tensor that are read at once: pieces of some blocks, or all."""
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    num_blocks = PIECE_VALUES // block_values if in_pieces else tensor.num_bytes // block_bytes
    size = num_blocks * block_bytes
    return [
        TensorPart(
            tensor,
            start // block_bytes * block_values,
            tensor.start + start,
            min(size, tensor.num_bytes - start),
        )
        for start in range(0, tensor.num_bytes, size)
    ]


def run_ahead(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Yield the results of a function in order, while other threads compute the next ones.

    Every item runs in one thread: threads of torch that share its small steps wait for each other,
    which on a busy machine took twenty times as long.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    waiting: deque[Future[Result]] = deque()
    try:
        with ThreadPoolExecutor(num_threads) as pool:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > 2 * num_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    finally:
        torch.set_num_threads(num_threads)
