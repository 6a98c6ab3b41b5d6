"""Changes of GGUF files for tests: keys and tensors as they are in the file, read, changed and
written again.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrain_serve.layouts.gguf_file import (
    TensorSource,
    find_gguf,
    open_gguf,
    read_keys,
    read_tensors,
    write_gguf,
)

Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]
OWN_KEYS = (
    "general.architecture",
    "general.type",
    "general.file_type",
    "general.quantization_version",
)


def change_gguf(directory: Path, change: Change) -> Path:
    """Change keys and tensors of the GGUF file of a directory; return the directory."""
    path = find_gguf(directory)
    reader = open_gguf(path)
    keys = read_keys(reader, with_vocabulary=True)
    tensors = read_tensors(reader)
    change(keys, tensors)
    sources = {
        name: TensorSource.from_tensor(tensor.contiguous()) for name, tensor in tensors.items()
    }
    own = {key: value for key, value in keys.items() if key not in OWN_KEYS}
    write_gguf(path, keys["general.architecture"], own, sources, None)
    return directory


def interleave(tensor: Tensor, head_dim: int) -> Tensor:
    """Return rows of heads with dimension i beside dimension i + head_dim / 2."""
    order = torch.arange(head_dim).reshape(2, -1).T.reshape(-1)
    return tensor.reshape(-1, head_dim, *tensor.shape[1:])[:, order].reshape(tensor.shape)


def separate(tensor: Tensor, head_dim: int) -> Tensor:
    """Return rows of heads with the first of each pair before the second of each: the inverse of
    `interleave`.
    """
    order = torch.arange(head_dim).reshape(-1, 2).T.reshape(-1)
    return tensor.reshape(-1, head_dim, *tensor.shape[1:])[:, order].reshape(tensor.shape)


def change_rows(
    tensors: dict[str, Tensor], reorder: Callable[[Tensor, int], Tensor], head_dim: int
) -> None:
    """Reorder the rows of queries and keys."""
    for name in tensors:
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            tensors[name] = reorder(tensors[name], head_dim)
