"""State of captured rounds: tensors that keep their addresses, a log that stays on the device, and
a timer without waiting.

Shapes: B batch, P tokens that a round may emit, K rounds between two reads by the host.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spectrain.drafters.context import Context
from spectrain.kernels.round_log import round_log
from spectrain.models.features import Features

from .generation import ROUND_PARTS, RoundRecord
from .loop import RoundOutcome


@dataclass
class StaticContext(Context):
    """A context whose tensors keep their addresses from round to round and from prompt to
    prompt.
    """

    keeps_features: bool = True  # whether a drafter reads them
    # committed features [B, P] and the number of valid ones [B]
    feature_buffers: tuple[Features, Tensor] | None = None

    def commit_features(self, features: Features, path: Tensor, counts: Tensor) -> None:
        if not self.keeps_features:
            self.cache.commit(path, counts)
            return
        if self.feature_buffers is None:
            hidden = features.hidden.new_zeros(*path.shape, *features.hidden.shape[2:])
            self.feature_buffers = (
                Features(torch.zeros_like(path), features.layers, hidden),
                torch.zeros_like(counts),
            )
        buffer, buffer_counts = self.feature_buffers
        has_features = buffer.hidden.numel() > 0
        self.cache.commit(
            path,
            counts,
            features.hidden if has_features else None,
            buffer.hidden if has_features else None,
        )
        buffer.tokens.copy_(features.tokens.gather(1, path))
        buffer_counts.copy_(counts)
        self.new_features, self.num_new = self.feature_buffers
        # only 0 or not matters, and torch.compile would compile again for every number
        self.round = 1


class RoundLog:
    """Records of up to K rounds, held on the device until the host reads them: tokens, their
    number, sizes of the tree.
    """

    def __init__(self, rounds: int, emitted: Tensor) -> None:
        batch, self.width = emitted.shape
        self.next_slot = torch.zeros(1, dtype=torch.int64, device=emitted.device)
        self.records = torch.zeros(
            rounds, batch, self.width + 4, dtype=torch.int64, device=emitted.device
        )

    def write_round(self, outcome: RoundOutcome) -> None:
        tree = outcome.tree
        assert tree.pruning is None, "pruning reads values from the device"
        round_log(
            self.records,
            self.next_slot,
            outcome.emitted_tokens,
            outcome.num_emitted,
            tree.depths,
            tree.valid,
            tree.can_emit,
        )
        self.next_slot += 1

    def read(self, rounds: int) -> list[list[RoundRecord]]:
        """Return the records of the rounds since the last read, by row. Only here does the host
        wait for the device.
        """
        records = self.records[:rounds].tolist()
        self.next_slot.zero_()
        return [
            [
                RoundRecord(record[: record[self.width]], *record[self.width + 1 :])
                for record in rows
            ]
            for rows in records
        ]


class RoundTimer:
    """Times the parts of rounds: by events on a GPU, by the clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        self.events: list[Any] = []

    def __call__(self) -> None:
        if self.is_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append(event)
        else:
            self.events.append(time.perf_counter())

    def read_seconds(self) -> list[dict[str, float]]:
        """Return the seconds of every round by part, after the device has finished them."""
        rounds = [
            self.events[first : first + len(ROUND_PARTS)]
            for first in range(0, len(self.events), len(ROUND_PARTS))
        ]
        return [
            dict(zip(ROUND_PARTS, (self.elapsed_seconds(a, b) for a, b in zip(events, events[1:]))))
            for events in rounds
        ]

    def elapsed_seconds(self, first: Any, last: Any) -> float:
        return first.elapsed_time(last) / 1e3 if self.is_gpu else last - first


@dataclass
class BatchState:
    """The tensors of a batch of one size and the graphs captured over them."""

    context: StaticContext
    log: RoundLog | None = None  # made after the first round, whose width it needs
    # state between rounds, such as its cache
    drafter_state: dict[str, Any] = field(default_factory=dict)
    # the fixed storage of each tensor among them
    static_tensors: dict[str, Tensor] = field(default_factory=dict)
    num_warm_rounds: int = 0  # rounds run in the shapes that will be captured
    graphs: list[Any] = field(default_factory=list)  # a torch.cuda.CUDAGraph a part
