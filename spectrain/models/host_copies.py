"""Small tensors that a GPU and the host both hold: tokens, loss masks, and indices of rows.

Rows are chosen on the host, and their indices are copied to the device. A choice by a mask on a GPU
would make the host wait until the GPU has computed everything before it, in the middle of a
training step. Shapes: B batch, T tokens, R chosen rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# Tensors on devices, by object, with the host's tensors that they are copies of.
_host_tensors = WeakIdKeyDictionary()


def copy_to_device(host: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor of the host to a device, and remember it for `on_host`. The host does not wait
    for the copy. Neither tensor may be changed in place afterwards.
    """
    device = torch.device(device)
    if host.device.type != "cpu" or device.type == "cpu":
        return host.to(device)
    # Only a copy from pinned memory lets the host go on.
    source = host.pin_memory() if device.type == "cuda" and torch.cuda.is_available() else host
    copy = source.to(device, non_blocking=True)
    _host_tensors[copy] = host
    return copy


def on_host(tensor: Tensor) -> Tensor:
    """Return the tensor of the host that `copy_to_device` made this one from; copy any other one,
    which waits for its device.
    """
    host: Tensor | None = None if tensor.device.type == "cpu" else _host_tensors.get(tensor)
    return tensor.cpu() if host is None else host


def chosen_rows(chosen: Tensor, device: torch.device) -> Tensor:
    """Return the indices [R] at which a mask that the host has is true, in its flat order, on a
    device.
    """
    return copy_to_device(on_host(chosen).flatten().nonzero()[:, 0], device)


def select_rows(values: Tensor, chosen: Tensor) -> Tensor:
    """Select [R, ..] of values [B, T, ..], in order, where `chosen` [B, T], a mask that the host
    has, is true.
    """
    rows = chosen_rows(chosen, values.device)
    return values.flatten(0, chosen.dim() - 1).index_select(0, rows)


def select_joined(parts: Sequence[Tensor], order: Tensor) -> Tensor:
    """Return the rows of parts [.., D] one below the other, in an order [R] that the host has and
    that names each row once. Every row is read and written once, and so is its gradient.
    """
    row_indices = on_host(order).argsort().split([len(part) for part in parts])
    device = parts[0].device
    joined: Tensor = _JoinedRows.apply(
        len(order), [copy_to_device(rows, device) for rows in row_indices], *parts
    )
    return joined


class _JoinedRows(torch.autograd.Function):
    """Writes the rows of each part to their rows of the result."""

    @staticmethod
    def forward(ctx: Any, count: int, row_indices: list[Tensor], *parts: Tensor) -> Tensor:
        ctx.row_indices = row_indices
        joined = parts[0].new_empty(count, *parts[0].shape[1:])
        for rows, part in zip(row_indices, parts):
            joined.index_copy_(0, rows, part)
        return joined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(grad.index_select(0, rows) for rows in ctx.row_indices)
