"""The numbers of a training step: its losses, hits and counts, and whether its gradient is finite.

They stay on the device while the step runs. On a GPU the host reads them after it has started the
next step, so that it never waits in the middle of one. Shapes: K draft steps of a family's losses.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spectrain.drafters.base import Losses

from .checkpoints import Tally


@dataclass(frozen=True)
class Shares:
    """How the numbers of a batch count in those of a step."""

    # Factor of the loss in its gradient.
    scale: float
    # Number of processes with different data.
    ranks: int
    # Number of processes whose losses add up.
    parts: int


def join_numbers(losses: Losses, total: Tensor, shares: Shares) -> Tensor:
    """Return the scaled sum `total` of losses, their terms, hits and counts, [1 + terms + 2 K] in
    float64 on their device.
    """
    factor = shares.parts / shares.ranks
    scalars = torch.stack([part.detach().double() for part in (total, *losses.terms.values())])
    counted = [part.detach().float() * factor for part in (losses.hits, losses.counts)]
    return torch.cat([scalars, *(part.double() for part in counted)])


@dataclass(frozen=True)
class BatchSums:
    """What a batch adds to a step."""

    # Those of `join_numbers`.
    numbers: Tensor
    terms: tuple[str, ...]
    shares: Shares
    tokens: int
    # Whether it is a batch of this process, or another one's that it runs with a weight of 0.
    is_own: bool

    def make_tally(self, numbers: list[float]) -> Tally:
        """Return the sums of the batch from its numbers on the host."""
        shares = self.shares
        loss, *rest = numbers
        values, counted = rest[: len(self.terms)], rest[len(self.terms) :]
        terms = {
            name: value * shares.scale / shares.ranks for name, value in zip(self.terms, values)
        }
        depths = len(counted) // 2
        tally = Tally(
            loss / shares.ranks,
            tokens=self.tokens,
            terms=terms,
            hits=counted[:depths],
            counts=counted[depths:],
        )
        return tally if self.is_own else tally.without_counts()


@dataclass
class StepSums:
    """The numbers of a step, which are read once, after it."""

    # The number of the step, from 1, and what the host knows of it.
    step: int
    tally: Tally
    batches: list[BatchSums] = field(default_factory=list)

    def start_reading(self, finite: Tensor) -> None:
        """Copy the numbers to the host, with whether the gradient is finite, without waiting."""
        parts = [finite.detach().double().reshape(1), *(batch.numbers for batch in self.batches)]
        device = parts[-1].device
        numbers = torch.cat([part.to(device) for part in parts])
        self.done: Any = None
        if device.type == "cuda":
            self.numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            self.done = torch.cuda.Event()
            self.done.record()
        else:
            self.numbers = numbers

    def read_numbers(self) -> tuple[Tally, bool]:
        """Return the sums of the step and whether its gradient is finite, once they are there."""
        if self.done is not None:
            self.done.synchronize()
        finite, *numbers = self.numbers.tolist()
        for batch in self.batches:
            count = len(batch.numbers)
            self.tally.add_tally(batch.make_tally(numbers[:count]))
            numbers = numbers[count:]
        return self.tally, bool(finite)
