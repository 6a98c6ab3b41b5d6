"""A recurrent module, called over the rows of a target's forward. Shapes: B batch, N tokens or nodes, D width."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spectrain.kernels.tree_attention import Visibility

from .forward_override import Forward
from .kv_cache import TreeCache
from .recurrent import PathPolicy, Recurrence
from .recurrent_nodes import RecurrentModule, make_state_call


def make_recurrent_forward(
    stateful: RecurrentModule,
    layer: int,
    cache: TreeCache | None,
    visibility: Visibility | list[Visibility] | None,
    lengths: tuple[int, ...] | None,
    along: PathPolicy,
) -> Forward:
    """Return the forward that replaces a recurrent module's own: over packed documents one by one, or over prompts and nodes
    with the states of a cache."""
    module: Any = stateful.module
    forward = type(module).forward.__get__(module)

    def documents(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert lengths is not None
        parts = [forward(part, *args, **kwargs) for part in hidden_states.split(lengths, dim=1)]
        if isinstance(parts[0], Tensor):
            return torch.cat(parts, dim=1)
        return tuple(torch.cat(those, dim=1) if those[0] is not None else None for those in zip(*parts))

    def nodes(*args: Any, **kwargs: Any) -> Any:
        assert cache is not None
        hidden = args[0] if args else kwargs["hidden_states"]
        call = make_state_call(stateful, layer, cache, args, kwargs)
        recurrence = cache.recurrences.setdefault(layer, Recurrence(along))
        if visibility is None:
            said = cache.prompt_lengths
            whole = torch.full_like(cache.lengths, hidden.shape[1])
            return call.split_output(recurrence.run_prompts(call, hidden, whole if said is None else said))
        assert isinstance(visibility, Visibility)
        return call.split_output(recurrence.run_nodes(call, hidden, visibility.tree))

    return documents if cache is None else nodes
