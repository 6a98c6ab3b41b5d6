"""What nodes see of the slots of a row, in the form that the kernels of attention take. Shapes: N
nodes, M appended nodes, T slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spectrain.kernels.tree_attention import Visibility


class RowLimits(NamedTuple):
    """What N nodes of a row see of T slots: committed ones, and M appended nodes."""

    # [2] int64: the first slot that some node sees, and the committed slots from there on
    slots: Tensor
    mask: Tensor  # [N, M] bool
    hidden: Tensor | None  # [N] int64: slots from the first on that each node does not see


def list_row_limits(visibility: Visibility, window: int | None) -> list[RowLimits]:
    """Return what the nodes of each row see within a window and within chunks; built once for all
    layers.
    """
    limits: list[RowLimits] | None = visibility.kernel_limits.get(window)
    if limits is None:
        limits = visibility.kernel_limits[window] = _make_limits(visibility, window)
    return limits


def _make_limits(visibility: Visibility, window: int | None) -> list[RowLimits]:
    lengths, tree = visibility.lengths, visibility.tree
    num_slots = visibility.longest + tree.shape[2]
    if visibility.chunk_size is None and (window is None or num_slots <= window):
        slots = torch.stack([torch.zeros_like(lengths), lengths], dim=1)
        return [RowLimits(*limits, None) for limits in zip(slots, tree.contiguous())]
    assert visibility.key_positions is not None
    here = visibility.query_positions.expand(tree.shape[:2])
    oldest = torch.zeros_like(here) if window is None else here - window + 1
    if visibility.chunk_size is not None:
        oldest = torch.maximum(oldest, here // visibility.chunk_size * visibility.chunk_size)
    tree = (tree & (visibility.key_positions[:, None] >= oldest[:, :, None])).contiguous()
    hidden = oldest.clamp(min=0).minimum(lengths[:, None])
    first = hidden.amin(1)
    slots = torch.stack([first, lengths - first], dim=1)
    hidden = (hidden - first[:, None]).contiguous()
    return [RowLimits(*limits) for limits in zip(slots, tree, hidden)]
