"""The states that recurrent layers (linear attention, Mamba, short convolutions) keep instead of
keys and values, over a tree.

The state of a node follows from that of its parent. Nodes run in one of two ways. Level by level,
each node starts from the state of its parent and has a state of its own. Along paths, there is one
row for each leaf, which the module computes over several tokens at once from the committed state;
the accepted path is then run again at the commit. Either way the input and output linears of a
module see every node once, and the modules of the layers stay unchanged. Shapes: B batch, N new
nodes, M appended nodes (the new ones last), D width, K nodes of a level, L leaves, I inner width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .recurrent_calls import (
    LayerStates,
    StateCall,
    StateNodes,
    concat_states,
    count_rows,
    gather_states,
    is_conv_only,
)

PathPolicy = Literal["never", "where cheaper", "always"]
"""When nodes run along paths: "never" where a module computes several tokens at once differently
from token by token.
"""
NODES_PER_CHUNK = 4
"""A chunk of a recurrence costs as much as a quarter of it takes token by token. Measured on a Xeon
core with transformers' own code, six tokens after a state, without the linears: gated delta rule
8.0 ms in a chunk of 64, 7.5 ms in steps; Mamba 2 37 ms in a chunk of 256, 10 ms; Nemotron-H 12 ms
in one of 128, 10 ms; and the accepted ones are run once more."""


class Recurrence:
    """The states of one layer: of every row at its last committed token, and of the nodes after
    it.
    """

    def __init__(self, path_policy: PathPolicy = "never") -> None:
        self.path_policy = path_policy
        # the rows of the batch, then nodes in order of arrival
        self.states: LayerStates | None = None
        self.state_rows: Tensor | None = None  # [B, M] state row of each node, when run by level
        # nodes that were run along paths and have no states
        self.path_nodes: StateNodes | None = None
        self.visible: Tensor | None = None  # [B, M, M] of these
        # after all nodes, where these are one path per row
        self.end_states: LayerStates | None = None
        self.has_committed = False

    def run_prompts(self, call: StateCall, hidden: Tensor, lengths: Tensor) -> Tensor:
        """Run prompts [B, T, D], each row with its own length, into an empty recurrence."""
        outputs = list[Tensor]()

        def run(length: int, rows: Tensor) -> LayerStates:
            states = LayerStates()
            part = call(hidden[rows, :length], states)
            if not outputs:
                outputs.append(part.new_zeros(*hidden.shape[:2], part.shape[-1]))
            outputs[0][rows, :length] = part
            return states

        self._set_committed(_states_by_count(lengths, run))
        return outputs[0]

    def run_nodes(self, call: StateCall, hidden: Tensor, visible: Tensor) -> Tensor:
        """Run new nodes [B, N, D]; `visible` [B, N, M] marks the appended nodes that each sees,
        itself included.
        """
        new = StateNodes(call, hidden)
        num_new = hidden.shape[1]
        if self.state_rows is not None:
            return new.project_output(self._run_levels(new, visible))
        if self.path_nodes is not None and self.visible is not None:
            new = self.path_nodes.append_nodes(new)
            visible = torch.cat([F.pad(self.visible, (0, num_new)), visible], dim=1)
        paths = TreePaths.from_visible(visible)
        if self._uses_paths(paths, call):
            self.path_nodes = new
            self.visible = visible
            inner = self._run_paths(new, paths)
        else:
            inner = self._run_levels(new, visible)
            self.path_nodes = self.visible = self.end_states = None
        return new.project_output(inner[:, -num_new:])

    def commit(self, path: Tensor | None, counts: Tensor) -> None:
        """Keep the state after the first `counts` [B] appended nodes, or after those of `path`
        [B, P].
        """
        if self.path_nodes is not None:
            self._set_committed(self._states_after(self.path_nodes, path, counts))
        elif self.states is not None and self.state_rows is not None:
            last = (counts - 1).clamp(min=0)[:, None]
            node = last if path is None else path.gather(1, last)
            committed = torch.arange(len(counts), device=counts.device)
            rows = torch.where(counts > 0, self.state_rows.gather(1, node)[:, 0], committed)
            self._set_committed(gather_states(self.states, rows))

    def reorder_nodes(self, order: Tensor) -> None:
        """Reorder the appended nodes: the i-th becomes node `order[b, i]`."""
        if self.state_rows is not None:
            self.state_rows = self.state_rows.gather(1, order)
        if self.path_nodes is not None and self.visible is not None:
            self.path_nodes = self.path_nodes.reorder_nodes(order)
            rows = torch.arange(len(order), device=order.device)[:, None, None]
            self.visible = self.visible[rows, order[:, :, None], order[:, None]]
            self.end_states = None

    def roll_back(self, batch: int) -> None:
        """Discard the nodes."""
        if self.states is not None and self.state_rows is not None:
            committed = torch.arange(batch, device=self.state_rows.device)
            self.states = gather_states(self.states, committed) if self.has_committed else None
        self.state_rows = self.path_nodes = self.visible = self.end_states = None

    def _set_committed(self, states: LayerStates) -> None:
        """Store the committed states of the rows and discard those of nodes."""
        self.states = states
        self.has_committed = True
        self.state_rows = self.path_nodes = self.visible = self.end_states = None

    def _uses_paths(self, paths: TreePaths, call: StateCall) -> bool:
        """Return whether nodes run along paths. A single node always does."""
        batch, num_nodes = paths.shape
        if num_nodes == 1 or self.path_policy != "where cheaper":
            return num_nodes == 1 or self.path_policy == "always"
        if self.states is not None and is_conv_only(self.states):
            return True
        if paths.nodes.device.type == "cpu":
            return (
                len(paths.rows) * call.recurrent.chunk_size <= NODES_PER_CHUNK * batch * num_nodes
            )
        # A call launches the same kernels for one row as for many.
        return len(paths.rows) == batch

    def _start_states(self, rows: Tensor) -> LayerStates:
        """Return copies of the committed states of some rows."""
        return LayerStates() if self.states is None else gather_states(self.states, rows)

    def _run_paths(self, nodes: StateNodes, paths: TreePaths) -> Tensor:
        """Run one row for every leaf and return [B, M, I]."""
        states = self._start_states(paths.rows)
        inner = nodes.run(paths.rows, paths.nodes, states)
        output = inner.new_zeros(*paths.shape, inner.shape[-1])
        rows = paths.rows[:, None].expand_as(paths.nodes)
        output[rows[paths.valid], paths.nodes[paths.valid]] = inner[paths.valid]
        self.end_states = (
            states if len(paths.rows) == paths.shape[0] and bool(paths.valid.all()) else None
        )
        return output

    def _states_after(self, nodes: StateNodes, path: Tensor | None, counts: Tensor) -> LayerStates:
        """Return the states after the first `counts` [B] nodes of a path, for nodes that were
        run along paths.
        """
        batch, num_nodes = nodes.hidden.shape[:2]
        path = (
            torch.arange(num_nodes, device=counts.device).expand(batch, -1)
            if path is None
            else path
        )

        def run(count: int, rows: Tensor) -> LayerStates:
            if count == num_nodes and self.end_states is not None:
                return gather_states(self.end_states, rows)
            states = self._start_states(rows)
            if count:
                nodes.run(rows, path[rows, :count], states)
            return states

        return _states_by_count(counts, run)

    def _run_levels(self, nodes: StateNodes, visible: Tensor) -> Tensor:
        """Run siblings from the same state and return [B, N, I]."""
        batch, num_new, num_nodes = visible.shape
        columns = torch.arange(num_nodes, device=visible.device)
        above = visible & (columns != columns[-num_new:, None])
        parents = torch.where(above, columns, -1).amax(-1)  # [B, N]
        levels = above.sum(-1)
        rows = torch.zeros(batch, num_nodes, dtype=torch.int64, device=visible.device)
        if self.state_rows is not None:
            rows[:, :-num_new] = self.state_rows
        parts = [] if self.states is None else [self.states]
        inner = None
        before = sum(map(count_rows, parts))
        for level in levels.unique().tolist():
            row, node = (levels == level).nonzero(as_tuple=True)
            parent = parents[row, node]
            start = torch.where(parent < 0, row, rows[row, parent.clamp(min=0)])
            states = _gather_rows(parts, start) if parts else LayerStates()
            run = nodes.run(row, node[:, None], states)
            inner = run.new_zeros(batch, num_new, run.shape[-1]) if inner is None else inner
            inner[row, node] = run[:, 0]
            rows[row, node + num_nodes - num_new] = before + torch.arange(
                len(row), device=row.device
            )
            before += len(row)
            parts.append(states)
        self.states = concat_states(parts)
        self.state_rows = rows
        assert inner is not None
        return inner


def _states_by_count(counts: Tensor, run: Callable[[int, Tensor], LayerStates]) -> LayerStates:
    """Return the states of all rows [B], where `run(count, rows)` returns those of the rows with
    the same count.
    """
    parts = []
    order = []
    for count in counts.unique().tolist():
        rows = (counts == count).nonzero()[:, 0]
        parts.append(run(count, rows))
        order.append(rows)
    return gather_states(concat_states(parts), torch.cat(order).argsort())


def _gather_rows(parts: list[LayerStates], rows: Tensor) -> LayerStates:
    """Copy these rows of all parts, or of the last part alone where it holds them all."""
    before = sum(map(count_rows, parts[:-1]))
    return (
        gather_states(parts[-1], rows - before)
        if bool((rows >= before).all())
        else gather_states(concat_states(parts), rows)
    )


@dataclass(frozen=True)
class TreePaths:
    """The paths from the committed tokens to every leaf."""

    shape: tuple[int, int]  # B, M
    rows: Tensor  # [L] of the batch
    nodes: Tensor  # [L, longest]
    valid: Tensor  # [L, longest] False after the end of a path

    @classmethod
    def from_visible(cls, visible: Tensor) -> TreePaths:
        """Build the paths of nodes from what they see, [B, M, M]."""
        batch, num_nodes, _ = visible.shape
        itself = torch.eye(num_nodes, dtype=torch.bool, device=visible.device)
        rows, leaves = (~(visible & ~itself).any(1)).nonzero(as_tuple=True)
        on_path = visible[rows, leaves] | itself[leaves]
        lengths = on_path.sum(-1)
        longest = int(lengths.max())
        nodes = (~on_path).long().argsort(dim=1, stable=True)[:, :longest]
        return cls(
            (batch, num_nodes),
            rows,
            nodes,
            torch.arange(longest, device=rows.device) < lengths[:, None],
        )
