"""Other forwards in the place of modules' own: the one way in which anything here changes what a layer runs.

Layers that are skipped, dropped for some sequences, checkpointed or compiled, and linears whose weights lie ready for oneDNN.
Shapes: B batch, T tokens, D width.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Forward = Callable[..., Any]


def set_forward(module: nn.Module, forward: Forward | None) -> Forward | None:
    """Let `forward` run in a module's place, or the forward of its class where it is None; returns what did so before."""
    before: Forward | None = vars(module).get("forward")
    if forward is not None:
        module.forward = forward
    elif before is not None:
        del module.forward
    return before


@contextmanager
def override_forwards(forwards: Iterable[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """These forwards in the place of the modules', for as long as this lasts."""
    before: list[tuple[nn.Module, Forward | None]] = []
    try:
        for module, forward in forwards:
            before.append((module, set_forward(module, forward)))
        yield
    finally:
        for module, own in reversed(before):
            set_forward(module, own)


def checkpoint_layer(layer: nn.Module) -> Forward:
    """Gradient checkpointing: of the layer only the input is kept, and the backward pass runs it again."""
    return partial(checkpoint, layer.forward, use_reentrant=False)


def identity(num_returned: int) -> Forward:
    """In a layer's place, nothing: its input is its output."""

    def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states, *[None] * (num_returned - 1)) if num_returned else hidden_states

    return run


def zeros(returns_tuple: bool) -> Forward:
    """In the place of attention or feed-forward, whose output is added to the residual stream: zeros."""

    def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        nothing = torch.zeros_like(hidden_states)
        return (nothing, None) if returns_tuple else nothing

    return run


def run_on_subset(
    layer: nn.Module, kept: Tensor, lengths: tuple[int, ...] | None, returns_tuple: bool, device: torch.device
) -> Forward:
    """The layer for the sequences in `kept`, [B] bool, which are rows, or stretches of a packed row; others pass it by."""
    forward = layer.forward
    dim, remaining, kept_tokens = 0, None, kept
    if lengths is not None:
        dim, remaining = 1, tuple(length for length, keep in zip(lengths, kept.tolist()) if keep)
        kept_tokens = kept.repeat_interleave(torch.tensor(lengths))
    index = kept_tokens.nonzero()[:, 0].to(device)
    if not len(index):  # nothing to run, but others wait for this layer: a sequence that counts for nothing
        index = index.new_tensor(range(lengths[0]) if lengths is not None else [0])
        remaining = lengths[:1] if lengths is not None else None

    def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Whatever else has a part for each sequence is cut to the same ones."""
        size = hidden_states.shape[dim]
        args, kwargs = (_select_sequences(value, index, size, dim) for value in (args, kwargs))
        kwargs["lengths"] = remaining
        output = forward(hidden_states.index_select(dim, index), *args, **kwargs)
        states = output[0] if returns_tuple else output
        result = hidden_states.index_copy(dim, index, states) if kept.any() else hidden_states + 0 * states.sum()
        return (result, *output[1:]) if returns_tuple else result

    return run


def _select_sequences(value: Any, index: Tensor, size: int, dim: int) -> Any:
    """The same arguments for some sequences of the batch, dim 0, or for some tokens, dim 1, of packed ones."""
    if isinstance(value, Tensor):
        return value.index_select(dim, index) if value.dim() > 1 and value.shape[dim] == size else value
    if isinstance(value, (tuple, list)):
        return type(value)(_select_sequences(item, index, size, dim) for item in value)
    return {key: _select_sequences(item, index, size, dim) for key, item in value.items()} if isinstance(value, dict) else value
