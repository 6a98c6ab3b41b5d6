"""Context parallelism: the columns of a batch that one process runs, and how attention reads the
columns of the others.

Every process of a context group holds the tokens and masks of the complete batch. It holds features
and activations only at its columns, a piece of every row. Everything but attention works on single
columns.

- Heads (DeepSpeed-Ulysses, arXiv 2309.14509): an all-to-all gives every process all columns of some
  heads, and another one gives the outputs of all heads at its columns back. Key-value heads that
  are too few are repeated.
- Keys (Llama 3, arXiv 2407.21783, section 3.3.2): every process gathers the keys and values of all
  columns.

The exchanges are torch's, with gradients. torch.distributed.tensor.experimental.context_parallel
(torch 2.13) does not serve
here: it replaces torch's attention by a ring of CUDA kernels that take no mask, so it knows no
packed documents, windows, draft steps and blocks, nor a CPU, and rows must divide by twice the
number of processes.

Shapes: B batch, T columns of a row, t columns of this process, R rows, H query heads, G key-value
heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from spectrain.models.attention import attend_rows
from spectrain.models.cache_types import DEFAULT_OPTIONS, AttentionOptions

ContextMethod = Literal["ulysses", "gather"]
QueriesKeysValues = tuple[Tensor, Tensor, Tensor]


class UnrolledRows(NamedTuple):
    """What the attention of an unrolled drafter reads: queries, and the keys and values of the
    text and of earlier draft steps.
    """

    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    lengths: tuple[int, ...] | None
    options: AttentionOptions = DEFAULT_OPTIONS


@dataclass(frozen=True)
class RowOwners:
    """Which process of a context group runs each of R rows, such as draft slots."""

    # Number of rows of every process.
    sizes: tuple[int, ...]
    # [R] indices of the rows, those of each process in sequence; None if rows are ordered by
    # process.
    order: Tensor | None = None

    def restore_order(self, rows: Tensor) -> Tensor:
        """Return rows [1, H, R, ..] that are ordered by process in their own order."""
        return rows if self.order is None else rows.index_select(2, self.order.argsort())

    def order_by_process(self, rows: Tensor) -> Tensor:
        """Undo `restore_order`."""
        return rows if self.order is None else rows.index_select(2, self.order)


class ContextPiece:
    """All columns: one process runs the complete batch, and exchanges nothing."""

    is_whole = True
    # Whether attention from draft slots runs over the slots of all processes, for some heads.
    attends_all_slots = False

    def cut_columns(self, part: Tensor) -> Tensor:
        """Return the columns [B, t, ..] of this process from values [B, T, ..]."""
        return part

    def find_own(self, columns: Tensor) -> Tensor:
        """Return the indices of those of these columns [R] that this process runs."""
        return torch.arange(len(columns), device=columns.device)

    def find_owners(self, columns: Tensor) -> RowOwners:
        """Return which process runs each of the rows at these columns [R]."""
        return RowOwners((len(columns),))

    def exchange_qkv(self, q: Tensor, k: Tensor, v: Tensor, step: int = 0) -> QueriesKeysValues:
        """Return queries, keys and values as `attend_unrolled` reads them, from those of this
        process [B, H or G, t, D].

        Of draft steps after the first, a column reads only its own keys.
        """
        return q, k, v

    def exchange_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all columns, of the heads that this process attends to,
        from own ones [B, G, t, D].
        """
        return k, v

    def attend_unrolled(self, attend: Callable[..., Tensor], rows: UnrolledRows) -> Tensor:
        """Return a drafter's unrolled attention `attend` at the columns of this process,
        [B, H, t, D], from exchanged tensors.
        """
        return attend(*rows)

    def exchange_slots(self, qkv: QueriesKeysValues, owners: RowOwners) -> QueriesKeysValues:
        """Return queries, keys and values of draft slots [1, H or G, R, D] as their attention
        reads them, from own ones.
        """
        return qkv

    def return_slots(self, attended: Tensor, owners: RowOwners) -> Tensor:
        """Return the outputs of the slots of this process [1, H, r, D], from those of exchanged
        slots.
        """
        return attended

    def sum_over_processes(self, values: Tensor) -> Tensor:
        """Sum values, without a gradient, over the processes that share a batch."""
        return values


WHOLE = ContextPiece()


class SplitPiece(ContextPiece):
    """Some consecutive columns of every row."""

    is_whole = False

    def __init__(self, group: ContextGroup, num_columns: int) -> None:
        self.group = group
        # First columns of every process, and the number of all columns. Sizes differ by at most
        # one.
        self.bounds = [rank * num_columns // group.size for rank in range(group.size + 1)]
        self.start, self.stop = self.bounds[group.rank : group.rank + 2]
        self.owners = RowOwners(
            tuple(stop - start for start, stop in zip(self.bounds, self.bounds[1:]))
        )

    def cut_columns(self, part: Tensor) -> Tensor:
        return part[:, self.start : self.stop]

    def _find_ranks(self, columns: Tensor) -> Tensor:
        """Return the rank [R] of the process that runs each of these columns [R]."""
        return torch.bucketize(
            columns, torch.tensor(self.bounds[1:-1], device=columns.device), right=True
        )

    def find_own(self, columns: Tensor) -> Tensor:
        return (self._find_ranks(columns) == self.group.rank).nonzero()[:, 0]

    def find_owners(self, columns: Tensor) -> RowOwners:
        ranks = self._find_ranks(columns)
        return RowOwners(
            tuple(ranks.bincount(minlength=self.group.size).tolist()), ranks.argsort(stable=True)
        )

    def sum_over_processes(self, values: Tensor) -> Tensor:
        total = values.detach().clone()
        dist.all_reduce(total, group=self.group.process_group)
        return total


class HeadsPiece(SplitPiece):
    """Attention runs over all columns for a share of the heads."""

    attends_all_slots = True

    def exchange_qkv(self, q: Tensor, k: Tensor, v: Tensor, step: int = 0) -> QueriesKeysValues:
        q, k, v = self._exchange_heads((q, k, v), self.owners)
        return q, k, v

    def exchange_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self._exchange_heads((k, v), self.owners)
        return k, v

    def attend_unrolled(self, attend: Callable[..., Tensor], rows: UnrolledRows) -> Tensor:
        sinks = rows.options.sinks
        if sinks is not None:
            own = rows.options._replace(sinks=sinks.chunk(self.group.size)[self.group.rank])
            rows = rows._replace(options=own)
        return self.group.return_heads(attend(*rows), self.owners)

    def exchange_slots(self, qkv: QueriesKeysValues, owners: RowOwners) -> QueriesKeysValues:
        q, k, v = (owners.restore_order(part) for part in self._exchange_heads(qkv, owners))
        return q, k, v

    def return_slots(self, attended: Tensor, owners: RowOwners) -> Tensor:
        return self.group.return_heads(owners.order_by_process(attended), owners)

    def _exchange_heads(self, parts: Sequence[Tensor], owners: RowOwners) -> list[Tensor]:
        """Exchange rows of all heads [B, H or G, r, D] for all rows of the heads of this process
        [B, H or G / N, R, D].
        """
        size = self.group.size
        repeated = (repeat_heads(part, math.lcm(part.shape[1], size)) for part in parts)
        return self.group.collect_rows(
            [part.unflatten(1, (size, -1)).movedim(1, 0) for part in repeated], owners
        )


class KeysPiece(SplitPiece):
    """Attention runs at own columns over the gathered keys of all columns. It suits any number
    of heads.
    """

    def exchange_qkv(self, q: Tensor, k: Tensor, v: Tensor, step: int = 0) -> QueriesKeysValues:
        return (q, k, v) if step else (q, *self.exchange_keys(k, v))

    def exchange_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.group.collect_rows(
            [part.expand(self.group.size, *part.shape) for part in (k, v)], self.owners
        )
        return k, v

    def attend_unrolled(self, attend: Callable[..., Tensor], rows: UnrolledRows) -> Tensor:
        q, keys, values, lengths, options = rows
        # The sum keeps a process without columns in the exchanges of the backward pass.
        outputs = [q[:, :, :0] + 0 * sum(part.sum() for part in (keys[0], values[0]))]
        begin = 0
        for length in lengths or (keys[0].shape[2],):
            first = max(begin, self.start)
            stop = min(begin + length, self.stop)
            if first < stop:
                own = slice(first - self.start, stop - self.start)
                text = slice(begin, begin + length)
                seen_keys, seen_values = (
                    [parts[0][:, :, text], *(part[:, :, own] for part in parts[1:])]
                    for parts in (keys, values)
                )
                outputs.append(
                    attend_rows(q[:, :, own], seen_keys, seen_values, first - begin, options)
                )
            begin += length
        return torch.cat(outputs, dim=2)


@dataclass(frozen=True)
class ContextGroup:
    """The processes that share the columns of a batch."""

    process_group: dist.ProcessGroup
    rank: int
    size: int
    method: ContextMethod

    def make_piece(self, num_columns: int) -> SplitPiece:
        """Return the piece of this process of rows with `num_columns` columns."""
        if self.method == "ulysses":
            return HeadsPiece(self, num_columns)
        return KeysPiece(self, num_columns)

    def collect_rows(self, parts: Sequence[Tensor], owners: RowOwners) -> list[Tensor]:
        """Send a slice of every part [N, B, h, r, D] to each process; return the received ones
        joined, [B, h, R, D] each.

        Several parts take one exchange.
        """
        shapes = [(*part.shape[1:3], part.shape[4]) for part in parts]
        widths = [math.prod(shape) for shape in shapes]  # values of a row
        sent = torch.cat([part.flatten(1) for part in parts], dim=1)
        received = all_to_all_single_autograd(
            sent.flatten(),
            [sum(widths) * rows for rows in owners.sizes],
            [sent.shape[1]] * self.size,
            self.process_group,
        )
        chunks = received.split([width * rows for rows in owners.sizes for width in widths])
        joined = []
        for number, (batch, heads, width) in enumerate(shapes):
            pieces = zip(chunks[number :: len(parts)], owners.sizes)
            joined.append(
                torch.cat([chunk.view(batch, heads, rows, width) for chunk, rows in pieces], dim=2)
            )
        return joined

    def return_heads(self, attended: Tensor, owners: RowOwners) -> Tensor:
        """Return the rows [B, H, r, D] of this process from those of all processes of some heads
        [B, H / N, R, D].
        """
        batch, heads, _, width = attended.shape
        sent = attended.split(owners.sizes, dim=2)
        own = owners.sizes[self.rank]
        received = all_to_all_single_autograd(
            torch.cat([part.flatten() for part in sent]),
            [batch * heads * own * width] * self.size,
            [part.numel() for part in sent],
            self.process_group,
        )
        return received.view(self.size, batch, heads, own, width).movedim(0, 1).flatten(1, 2)


def repeat_heads(part: Tensor, num_heads: int) -> Tensor:
    """Repeat the heads of [B, G, R, D] in sequence, so that there are `num_heads`."""
    if part.shape[1] == num_heads:
        return part
    return part.repeat_interleave(num_heads // part.shape[1], dim=1)
