"""Overrides of modules' forwards: the only way in which this project changes what a layer runs.

They serve layers that are skipped, dropped for some sequences, checkpointed or compiled, and
linears with weights packed for oneDNN. Shapes: B batch, T tokens, D width.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .host_copies import copy_to_device

Forward = Callable[..., Any]


def set_forward(module: nn.Module, forward: Forward | None) -> Forward | None:
    """Set the forward of a module, or restore that of its class with None; return the former
    override.
    """
    before: Forward | None = vars(module).get("forward")
    if forward is not None:
        module.forward = forward
    elif before is not None:
        del module.forward
    return before


@contextmanager
def override_forwards(forwards: Iterable[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """Run these forwards instead of the modules' own while the context is open."""
    before: list[tuple[nn.Module, Forward | None]] = []
    try:
        for module, forward in forwards:
            before.append((module, set_forward(module, forward)))
        yield
    finally:
        for module, override in reversed(before):
            set_forward(module, override)


def checkpoint_layer(layer: nn.Module) -> Forward:
    """Return a forward with gradient checkpointing: only the input is stored, and the backward
    pass runs the layer again.
    """
    return partial(checkpoint, layer.forward, use_reentrant=False)


def identity(num_returned: int) -> Forward:
    """Return a forward whose output is its input."""

    def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states, *[None] * (num_returned - 1)) if num_returned else hidden_states

    return run


def zeros(returns_tuple: bool) -> Forward:
    """Return a forward that outputs zeros, for attention or feed-forward, whose output is added
    to the residual stream.
    """

    def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = torch.zeros_like(hidden_states)
        return (output, None) if returns_tuple else output

    return run


def run_on_subset(
    layer: nn.Module,
    running: Tensor,
    lengths: tuple[int, ...] | None,
    returns_tuple: bool,
    device: torch.device,
) -> Forward:
    """Return a forward that runs the layer for the sequences in `running`, [B] bool (rows, or parts
    of a packed row); the others skip it."""
    forward = layer.forward
    dim = 0
    remaining = None
    running_tokens = running
    if lengths is not None:
        dim = 1
        remaining = tuple(length for length, runs in zip(lengths, running.tolist()) if runs)
        running_tokens = running.repeat_interleave(torch.tensor(lengths))
    chosen = running_tokens.nonzero()[:, 0]
    # Other processes run this layer, so a dummy runs here.
    if not len(chosen):
        chosen = chosen.new_tensor(range(lengths[0]) if lengths is not None else [0])
        remaining = lengths[:1] if lengths is not None else None
    index = copy_to_device(chosen, device)

    def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run with every argument that has a part for each sequence cut to the same sequences."""
        size = hidden_states.shape[dim]
        args, kwargs = (_select_sequences(value, index, size, dim) for value in (args, kwargs))
        kwargs["lengths"] = remaining
        output = forward(hidden_states.index_select(dim, index), *args, **kwargs)
        states = output[0] if returns_tuple else output
        result = (
            hidden_states.index_copy(dim, index, states)
            if running.any()
            else hidden_states + 0 * states.sum()
        )
        return (result, *output[1:]) if returns_tuple else result

    return run


def _select_sequences(value: Any, index: Tensor, size: int, dim: int) -> Any:
    """Select some sequences of every argument, along dim 0, or some tokens of packed ones, along
    dim 1.
    """
    if isinstance(value, Tensor):
        return (
            value.index_select(dim, index)
            if value.dim() > 1 and value.shape[dim] == size
            else value
        )
    if isinstance(value, (tuple, list)):
        return type(value)(_select_sequences(item, index, size, dim) for item in value)
    return (
        {key: _select_sequences(item, index, size, dim) for key, item in value.items()}
        if isinstance(value, dict)
        else value
    )
