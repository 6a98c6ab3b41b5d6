"""What the key-value cache is asked for and what it calls: shapes, options of attention,
transforms, recurrent states.

Shapes: B batch, N nodes, T' slots in use, H heads, D head size.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor


class KeyValueShape(NamedTuple):
    """The numbers that the keys and values of one token take in a layer."""

    num_heads: int
    key_size: int  # of a head
    value_size: int

    @property
    def width(self) -> int:
        return self.num_heads * max(self.key_size, self.value_size)


class AttentionOptions(NamedTuple):
    """What the attention of a layer does beyond softmax(q k^T) v, by the argument names of
    `tree_attention`.
    """

    scale: float | None = None  # of the scores; None: by the head size
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [H]


DEFAULT_OPTIONS = AttentionOptions()
KVTransform = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, its keys, its values [B, H, T', D]) -> the keys and values that are attended to
instead.
"""
QueryObserver = Callable[[int, Tensor, float], None]
"""(layer, queries [B, H, N, D] of new nodes, the scale of their scores) -> None."""


class RecurrentStates(Protocol):
    """The states of a recurrent layer, which follow the commits of the cache."""

    def commit(self, path: Tensor | None, counts: Tensor) -> None: ...

    def reorder_nodes(self, order: Tensor) -> None: ...

    def roll_back(self, batch: int) -> None: ...
