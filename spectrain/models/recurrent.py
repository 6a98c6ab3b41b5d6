"""Layers that keep a state in place of keys and values (linear attention, Mamba, short convolutions), over a tree.

A node's state follows from its parent's, so each node behind the committed tokens has one of its own, computed level by level:
siblings start from the same. A commit keeps the state of the last accepted node. The layers' modules stay as they are: they are
called one token at a time, over as many rows as a level has nodes, with transformers' own cache of their states.
Shapes: B batch, N new nodes, M appended nodes (the new ones last), D width, K nodes of a level.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from spectrain.errors import UserError

States: TypeAlias = LinearAttentionLayer
"""States of several rows, [rows, ..] each."""
Run = Callable[[Tensor, States], Tensor]
"""A layer over [rows, T, D] from some states, which it brings up to date."""
OURS = ("visibility", "tree_cache", "lengths", "reaches", "calls")  # what attention is told, no affair of these layers


class Recurrence:
    """The states of one layer: of every row at its last committed token, and of every node behind it."""

    def __init__(self) -> None:
        self.states: States | None = None  # the rows of the batch, then nodes as they came
        self.rows: Tensor | None = None  # [B, M] where each node's is
        self.has_committed = False

    def read(self, run: Run, hidden: Tensor, lengths: Tensor) -> Tensor:
        """Prompts [B, T, D], of which each row has its own length, into an empty recurrence."""
        output, found, order = torch.zeros_like(hidden), [], []
        for length in lengths.unique().tolist():
            rows = (lengths == length).nonzero()[:, 0]
            states = LinearAttentionLayer()
            output[rows, :length] = run(hidden[rows, :length], states)
            found.append(states)
            order.append(rows)
        self.states = _taken(_joined(found), torch.cat(order).argsort())
        self.has_committed, self.rows = True, None
        return output

    def step(self, run: Run, hidden: Tensor, visible: Tensor) -> Tensor:
        """New nodes [B, N, D], which see what is `visible` [B, N, M] of the appended ones, themselves among them."""
        batch, num_new, num_nodes = visible.shape
        columns = torch.arange(num_nodes, device=visible.device)
        above = visible & (columns != columns[-num_new:, None])
        parents = torch.where(above, columns, -1).amax(-1)  # [B, N]
        levels = above.sum(-1)
        rows = torch.zeros(batch, num_nodes, dtype=torch.int64, device=visible.device)
        if self.rows is not None:
            rows[:, :-num_new] = self.rows
        output = torch.zeros_like(hidden)
        for level in levels.unique().tolist():
            row, node = (levels == level).nonzero(as_tuple=True)
            parent = parents[row, node]
            start = torch.where(parent < 0, row, rows[row, parent.clamp(min=0)])
            is_first = self.states is None
            states = LinearAttentionLayer() if self.states is None else _taken(self.states, start)
            output[row, node] = run(hidden[row, node][:, None], states)[:, 0]
            before = 0 if is_first else _count(self.states)
            self.states = states if self.states is None else _joined([self.states, states])
            rows[row, node + num_nodes - num_new] = before + torch.arange(len(row), device=row.device)
        self.rows = rows
        return output

    def commit(self, path: Tensor | None, counts: Tensor) -> None:
        """Keep the state after the first `counts` [B] appended nodes, or those of `path` [B, P]."""
        if self.states is None or self.rows is None:
            return
        last = (counts - 1).clamp(min=0)[:, None]
        node = last if path is None else path.gather(1, last)
        own = torch.arange(len(counts), device=counts.device)
        self.states = _taken(self.states, torch.where(counts > 0, self.rows.gather(1, node)[:, 0], own))
        self.has_committed, self.rows = True, None

    def arrange(self, order: Tensor) -> None:
        """The i-th appended node is node `order[b, i]` from now on."""
        if self.rows is not None:
            self.rows = self.rows.gather(1, order)

    def forget(self, batch: int) -> None:
        """Drop the nodes."""
        if self.states is not None and self.rows is not None:
            self.states = _taken(self.states, torch.arange(batch, device=self.rows.device)) if self.has_committed else None
        self.rows = None


def _mapped(states: States, change: Callable[[int, str], Tensor | None]) -> States:
    found = copy.copy(states)
    found.conv_states = {place: change(place, "conv_states") for place in states.conv_states}
    found.recurrent_states = {place: change(place, "recurrent_states") for place in states.recurrent_states}
    return found


def _taken(states: States, rows: Tensor) -> States:
    """Copies of some rows."""

    def take(place: int, name: str) -> Tensor | None:
        held = getattr(states, name)[place]
        return None if held is None else held[rows]

    return _mapped(states, take)


def _joined(parts: Sequence[States]) -> States:
    def join(place: int, name: str) -> Tensor | None:
        held = [getattr(part, name)[place] for part in parts]
        return None if held[0] is None else torch.cat(held)

    return _mapped(parts[0], join)


def _count(states: States | None) -> int:
    assert states is not None
    held = [*states.conv_states.values(), *states.recurrent_states.values()]
    return next(len(one) for one in held if one is not None)


class _OneLayer(Cache):
    """What a recurrent module is handed for a cache: its own states."""

    def __init__(self, layer: int, states: States) -> None:
        super().__init__(layers=[])
        self.layers = {layer: states}


def calling(forward: Callable[..., Tensor], cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any], layer: int) -> Run:
    """A recurrent module's call as it came, but for its states, which are to be said, and its first argument."""
    theirs = {key: value for key, value in kwargs.items() if key not in (*OURS, "hidden_states") and value is not cache}
    name = next((key for key, value in kwargs.items() if value is cache), None)
    if name is None:
        raise UserError(f"target: the state of its layer {layer} is not asked for as other models do; use another target")

    def run(hidden: Tensor, states: States) -> Tensor:
        return forward(hidden, *args[1:], **theirs, **{name: _OneLayer(layer, states)})

    return run


class Watching(DynamicCache):
    """Which modules ask for a state, found by the module that runs while it is asked for."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.running: list[nn.Module] = []
        self.found: dict[int, nn.Module] = {}

    @property
    def is_recurrent(self) -> bool:
        return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.layers)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self.found[layer_idx] = self.running[-1]
        return super().get_conv_state(layer_idx, state_idx)

    @contextmanager
    def over(self, layers: nn.ModuleList) -> Iterator[None]:
        """Watch the modules of these layers."""
        handles = []
        for module in layers.modules():
            handles.append(module.register_forward_pre_hook(lambda module, args: self.running.append(module)))
            handles.append(module.register_forward_hook(lambda module, args, output: self.running.pop() and None))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
