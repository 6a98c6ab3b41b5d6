"""Weights that stay in the quantised blocks of a GGUF file, on a CPU.

A store keeps the blocks in the order in which they are multiplied, and takes rows of values out of
them. What reads such a weight as a whole gets a dense copy, which lives as long as it
is used. Shapes: O output width, K input width, N rows.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten


class BlockStore(Protocol):
    """Quantised weights [O, K]."""

    @property
    def shape(self) -> tuple[int, int]:
        """Output and input width."""

    @property
    def content(self) -> Tensor:
        """The bytes of the blocks."""

    def store_rows(self, first: int, content: Tensor) -> None:
        """Store rows as they lie in a file, bytes [n, size], from the row `first` on; both are
        multiples of 16.
        """

    def values(self, rows: Tensor) -> Tensor:
        """Return the float32 values of some rows [n] of the weights, [n, K]."""

    def all_values(self, dtype: torch.dtype) -> Tensor:
        """Return the values of all rows in a type, [O, K]."""

    def first_rows(self, count: int) -> BlockStore:
        """Return the first rows, at least `count`, in the same memory."""

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [.., K] times the weights plus the bias, [.., O]."""


class BlockWeight(Tensor):
    """A frozen weight [O, K] of a type of floating-point numbers, whose values are in blocks.

    Rows are looked up one by one, and products multiply the blocks. Every other operation reads a
    dense copy. A RuntimeError says that it cannot be written to.
    """

    stays_in_blocks = True
    store: BlockStore

    @staticmethod
    def __new__(cls, store: BlockStore, dtype: torch.dtype) -> BlockWeight:
        weight: BlockWeight = Tensor._make_wrapper_subclass(
            cls, store.shape, dtype=dtype, device=torch.device("cpu")
        )
        return weight

    def __init__(self, store: BlockStore, dtype: torch.dtype) -> None:
        self.store = store

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockWeight:
        """Return the same weight, because nothing can change it."""
        return self

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of memory that the blocks take."""
        return self.store.content.nbytes

    @property
    def content(self) -> Tensor:
        """The bytes of the blocks."""
        return self.store.content

    def __tensor_flatten__(self) -> tuple[list[str], tuple[BlockStore, torch.dtype]]:
        """Return the name of the tensor that holds the values, and what else makes a weight."""
        return ["content"], (self.store, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        tensors: dict[str, Tensor], parts: tuple[BlockStore, torch.dtype], *sizes: Any
    ) -> BlockWeight:
        """Return the weight of these parts."""
        return BlockWeight(*parts)

    def dense(self) -> Tensor:
        """Return the values in the type of the weight, [O, K]."""
        return self.store.all_values(self.dtype)

    def take_rows(self, rows: Tensor) -> Tensor:
        """Return rows [..] of the weight, [.., K]."""
        values = self.store.values(rows.flatten()).to(self.dtype)
        return values.view(*rows.shape, self.shape[1])

    def first_rows(self, count: int) -> BlockWeight:
        """Return the first rows of the weight, at least `count`, in the same memory."""
        return BlockWeight(self.store.first_rows(count), self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            product = _find_product(*args, **(kwargs or {}))
            if product is not None:
                return product
        # Nothing can be written to it, so it is its own detached tensor.
        if func in (torch.detach, Tensor.detach):
            return args[0]
        # The default would make results weights in blocks too.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, BlockWeight):
            if func in (aten.detach.default, aten.alias.default):
                return BlockWeight(first.store, first.dtype)
            rows = _find_rows(func, args, kwargs or {})
            if rows is not None:
                return first.take_rows(rows)
            if func._schema.is_mutable:
                raise RuntimeError("a weight in the blocks of a GGUF file cannot be written to")
        args, kwargs = tree_map_only(BlockWeight, BlockWeight.dense, (args, kwargs or {}))
        return func(*args, **kwargs)


def _find_product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Return the product of rows with a weight in blocks; None where a gradient is needed, the
    rows have another type, or autocast computes in another one.
    """
    learns = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (input, bias)
    )
    casts = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") != weight.dtype
    if (
        learns
        or casts
        or type(weight) is not BlockWeight
        or isinstance(input, BlockWeight)
        or input.device.type != "cpu"
        or input.dtype != weight.dtype
    ):
        return None
    return weight.store.product(input, bias)


def _find_rows(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the rows that an operation takes of its first operand; None where it does more."""
    weight = args[0]
    if func is aten.embedding.default:
        return args[1]
    if func is aten.index_select.default and args[1] == 0:
        return args[2]
    if func is aten.index.Tensor and len(args[1]) == 1:
        rows = args[1][0]
        return rows.nonzero().flatten() if rows.dtype in (torch.bool, torch.uint8) else rows
    if func is aten.select.int and args[1] == 0:
        return torch.tensor(args[2] % len(weight))
    if func is aten.slice.Tensor and len(args) > 3 and args[1] == 0:
        step = args[4] if len(args) > 4 else 1
        return torch.arange(len(weight))[args[2] : args[3] : step]
    return None
