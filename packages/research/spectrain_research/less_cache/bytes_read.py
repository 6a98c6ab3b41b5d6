"""Memory traffic: how many bytes forwards of a target read of weights and of keys and values, by
the shapes of the tensors.

A forward reads a weight once, whatever the number of rows, and next to nothing of an embedding. A
layer reads the keys and values of all tokens in its window, once for all nodes, as a kernel does
that skips the others. Writes and activations are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from spectrain.models.device import forward_weights
from spectrain.models.kv_cache import storage_dtype
from spectrain.models.target import Target


class LinearCodes(Protocol):
    """Codes that stand for the weights of linear layers."""

    @property
    def linears(self) -> Mapping[nn.Module, Any]: ...

    @property
    def tensors(self) -> Sequence[Tensor]: ...


@dataclass(frozen=True)
class BytesRead:
    """Bytes that were read."""

    weights: int = 0
    keys: int = 0  # and values, and the data by which they are selected

    def __add__(self, other: BytesRead) -> BytesRead:
        return BytesRead(self.weights + other.weights, self.keys + other.keys)

    @property
    def total(self) -> int:
        return self.weights + self.keys


def tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def weight_bytes(target: Target, coded: LinearCodes | None = None) -> int:
    """Return the bytes of the weights that a forward reads, the output layer included, or of the
    copies in `coded`.
    """
    weights = forward_weights(nn.ModuleList([target.decoder, target.head.output]))
    if coded is None:
        return sum(map(tensor_bytes, weights))
    replaced = {id(linear.weight) for linear in coded.linears}
    return sum(tensor_bytes(weight) for weight in weights if id(weight) not in replaced) + sum(
        map(tensor_bytes, coded.tensors)
    )


def slot_bytes(target: Target) -> dict[int, int]:
    """Return the bytes of the keys and values of one token, by attention layer."""
    size = storage_dtype(target.dtype, target.device).itemsize
    shapes = {
        layer: attention.shape for layer, attention in target.architecture.attention_layers.items()
    }
    return {
        layer: size * shape.num_heads * (shape.key_size + shape.value_size)
        for layer, shape in shapes.items()
    }


def key_bytes(target: Target, length: int, nodes: int) -> int:
    """Return the bytes of keys and values that a forward over a chain of `nodes` after `length`
    tokens reads.
    """
    total = 0
    for layer, slot in slot_bytes(target).items():
        reach = target.architecture.attention_layers[layer].range
        furthest = min(
            size for size in (reach.window, reach.chunk, length + nodes) if size is not None
        )
        total += slot * min(length + nodes, furthest + nodes - 1)
    return total
