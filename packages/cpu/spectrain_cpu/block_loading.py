"""Loading of weights that stay in the quantised blocks of a GGUF file.

Shapes: O output width, K input width.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_gguf_pytorch_utils import TensorProcessor

from spectrain.models.gguf_blocks import dequantize
from spectrain.models.gguf_header import GgufHeader, StoredTensor
from spectrain.models.gguf_weights import (
    PIECE_VALUES,
    fill_weights,
    find_processor,
    has_block_kernel,
    match_tensors,
    read_weights,
    run_ahead,
)
from spectrain.output.count_progress import CountProgress

from .block_weights import BlockStore, BlockWeight
from .packed_product import allocate_blocks


class MappedRows:
    """Quantised rows [O, K] of a GGUF file that stay on the disk, in the form of a `BlockStore`:
    what is looked up is read and dequantised.
    """

    def __init__(self, content: Tensor, width: int, tensor_type: Any) -> None:
        self.content = content  # [O, bytes], memory-mapped
        self.width = width
        self.tensor_type = tensor_type

    @staticmethod
    def open(path: Path, tensor: StoredTensor) -> MappedRows:
        """Map a tensor of a file."""
        outputs, width = tensor.shape
        shape = outputs, tensor.num_bytes // outputs
        # Torch warns of memory that cannot be written to; what would be written stays in memory.
        mapped = np.memmap(path, np.uint8, mode="c", offset=tensor.start, shape=shape)
        return MappedRows(torch.from_numpy(mapped), width, tensor.tensor_type)

    @property
    def shape(self) -> tuple[int, int]:
        """Output and input width."""
        return len(self.content), self.width

    def store_rows(self, first: int, content: Tensor) -> None:
        """Raise RuntimeError, because the rows are those of the file."""
        raise RuntimeError("rows of a mapped GGUF file cannot be written to")

    def values(self, rows: Tensor) -> Tensor:
        """Return the float32 values of some rows [n], [n, K]."""
        return self._read(self.content[rows]) if len(rows) else torch.empty(0, self.width)

    def all_values(self, dtype: torch.dtype) -> Tensor:
        """Return the values of all rows in a type, [O, K]."""
        return torch.cat([self._read(part).to(dtype) for part in self.content.split(1024)])

    def first_rows(self, count: int) -> MappedRows:
        """Return the first rows, which stay in the file too."""
        return MappedRows(self.content[:count], self.width, self.tensor_type)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [.., K] times the rows plus the bias, [.., O], by a dense copy."""
        return F.linear(x, self.all_values(x.dtype), bias)

    def _read(self, content: Tensor) -> Tensor:
        return dequantize(content.flatten(), self.tensor_type).view(len(content), self.width)


def load_block_weights(
    header: GgufHeader,
    network: Any,
    dtype: torch.dtype,
    in_bytes: bool,
    key: str,
    rounded: str | None = None,
) -> bool:
    """Give an empty network the weights of a file, and return whether this was done: those that
    are multiplied as they are stay in their blocks, and the others have a type. With `in_bytes`
    the inputs of products are rounded to 8 bits.

    With `rounded`, the name of a type of the gguf package, weights that take more bits than this
    type are rounded to it; the embedding is not.
    """
    rounded_type = None if rounded is None else gguf.GGMLQuantizationType[rounded]
    stored = match_tensors(header, network, key)
    processor = find_processor(header, network)
    looked_up = find_embedding(network)
    total = sum(tensor.num_bytes for tensor in stored.values())

    with (
        header.path.open("rb") as file,
        CountProgress(f"reading {header.path.name}", total) as progress,
    ):

        def read(name: str) -> nn.Parameter | None:
            tensor = stored[name]
            if not has_block_kernel(tensor):
                return None
            if name == looked_up:
                store: BlockStore = MappedRows.open(header.path, tensor)
            else:
                kind = choose_type(tensor, rounded_type)
                store = read_blocks(file.fileno(), tensor, processor, in_bytes, kind)
            return nn.Parameter(BlockWeight(store, dtype), requires_grad=False)

        weights = {}
        for name, weight in zip(stored, run_ahead(read, list(stored))):
            if weight is not None:
                weights[name] = weight
            progress.advance(stored[name].num_bytes)
    others = {name: tensor for name, tensor in stored.items() if name not in weights}
    for name, tensor in others.items():
        weights[name] = nn.Parameter(torch.empty(tensor.shape, dtype=dtype), requires_grad=False)
    fill_weights(weights, read_weights(header, network, others, dtype))
    network.load_state_dict(weights, strict=False, assign=True)
    network.tie_weights()
    return True


def find_embedding(network: Any) -> str | None:
    """Return the name of the embedding where it is looked up alone: no output layer shares it."""
    weight = network.get_input_embeddings().weight
    shared = network.get_output_embeddings()
    if shared is not None and shared.weight is weight:
        return None
    return next(name for name, other in network.named_parameters() if other is weight)


def choose_type(tensor: StoredTensor, rounded: Any | None) -> Any:
    """Return the type of blocks in which a tensor [O, K] is kept: `rounded` where that takes fewer
    bits than its own.
    """
    if rounded is None:
        return tensor.tensor_type
    width = tensor.shape[-1]
    sizes = []
    for kind in (rounded, tensor.tensor_type):
        block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        sizes.append(block_bytes / block_values)
    is_smaller = sizes[0] < sizes[1] and width % gguf.GGML_QUANT_SIZES[rounded][0] == 0
    return rounded if is_smaller else tensor.tensor_type


def read_blocks(
    file: int, tensor: StoredTensor, processor: Any, in_bytes: bool, kind: Any
) -> BlockStore:
    """Return the blocks of a tensor in the order of the model, as they are multiplied, rounded to
    blocks of the type `kind` where the tensor has another one.
    """
    outputs, width = tensor.shape
    store: BlockStore = allocate_blocks(outputs, width, kind, in_bytes)
    row_bytes = tensor.num_bytes // outputs
    is_moved = type(processor) is not TensorProcessor
    # What is moved is moved within a tensor.
    step = outputs if is_moved else max(1, PIECE_VALUES // width // 16) * 16
    for first in range(0, outputs, step):
        size = min(step, outputs - first) * row_bytes
        content = bytearray(os.pread(file, size, tensor.start + first * row_bytes))
        rows = torch.frombuffer(content, dtype=torch.uint8).view(-1, row_bytes)
        moved = move_rows(rows, tensor, processor) if is_moved else rows
        if kind != tensor.tensor_type:
            moved = round_rows(moved, tensor.tensor_type, kind)
        store.store_rows(first, moved)
    return store


def round_rows(rows: Tensor, stored: Any, kind: Any) -> Tensor:
    """Return rows of a type, bytes [n, size], in the blocks of another one."""
    values = dequantize(rows.flatten(), stored).view(len(rows), -1)
    return torch.from_numpy(gguf.quantize(values.numpy(), kind))


def move_rows(rows: Tensor, tensor: StoredTensor, processor: Any) -> Tensor:
    """Return rows in the order of the model: what a processor does to a matrix is to move rows."""
    numbers = torch.arange(len(rows), dtype=torch.float64)[:, None].numpy()
    moved = processor.process(weights=numbers, name=tensor.name).weights
    return rows[torch.from_numpy(moved).flatten().long()]
