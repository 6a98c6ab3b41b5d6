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
from spectrain.kernels.round_commit import LoggedTrees, RoundBuffers, Verdicts, round_commit
from spectrain.kernels.token_commit import TextBatch
from spectrain.models.features import Features
from spectrain.models.kv_cache import TreeCache
from spectrain.trees.token_tree import AcceptedPath, TokenTree

from .generation import ROUND_PARTS, RoundRecord


class RoundLog:
    """Records of up to K rounds, held on the device until the host reads them: tokens, their
    number, sizes of the tree.
    """

    def __init__(self, rounds: int, path: Tensor) -> None:
        batch, self.width = path.shape
        # [B] the line of each text's next round, modulo K
        self.next_lines = torch.zeros(batch, dtype=torch.int64, device=path.device)
        self.lines = torch.zeros(
            rounds, batch, self.width + 4, dtype=torch.int64, device=path.device
        )

    def start_copy(self, rounds: int, active: Tensor) -> LogCopy:
        """Start to copy the records of the rounds since the last copy, and which texts [B] are
        active, to the host, and let the next round write the first line. The host does not wait.
        """
        lines, states = (_copy_to_host(tensor) for tensor in (self.lines[:rounds], active))
        self.next_lines.zero_()
        event = None
        if active.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return LogCopy(lines, states, self.width, event)


def _copy_to_host(tensor: Tensor) -> Tensor:
    is_gpu = tensor.device.type == "cuda"
    host = torch.empty_like(tensor, device="cpu", pin_memory=is_gpu)
    return host.copy_(tensor, non_blocking=True)


@dataclass
class LogCopy:
    """Records of rounds [R, B, P + 4] that are on their way to the host, and whether texts [B] are
    active after them.
    """

    lines: Tensor
    active: Tensor
    width: int
    # Of a GPU: it is reached once both are there.
    event: Any

    def wait(self) -> None:
        """Wait until both are on the host."""
        if self.event is not None:
            self.event.synchronize()

    @property
    def is_any_active(self) -> bool:
        """Tell whether a text is active after these rounds; the host waits for them."""
        self.wait()
        return bool(self.active.any())

    def read(self) -> list[list[RoundRecord]]:
        """Return the records of the rounds, by row; the host waits for them."""
        self.wait()
        return [
            [
                RoundRecord(record[: record[self.width]], *record[self.width + 1 :])
                for record in rows
            ]
            for rows in self.lines.tolist()
        ]


@dataclass
class StaticContext(Context):
    """A context whose tensors keep their addresses from round to round and from prompt to
    prompt.
    """

    keeps_features: bool = True  # whether a drafter reads them
    rounds_per_read: int = 2  # lines of the log
    log: RoundLog | None = None  # made in the first round, whose width it needs
    # committed features [B, P] and the number of valid ones [B]
    feature_buffers: tuple[Features, Tensor] | None = None

    def commit(
        self, tree: TokenTree, features: Features, accepted: AcceptedPath
    ) -> tuple[Tensor, Tensor]:
        """Commit as a context does, and log the round."""
        assert tree.pruning is None, "pruning reads values from the device"
        path = accepted.path
        if self.log is None:
            self.log = RoundLog(self.rounds_per_read, path)
        if self.feature_buffers is None and self.keeps_features:
            hidden = features.hidden.new_zeros(*path.shape, *features.hidden.shape[2:])
            self.feature_buffers = (
                Features(torch.zeros_like(path), features.layers, hidden),
                torch.zeros_like(accepted.counts),
            )
        buffer, buffer_counts = self.feature_buffers or (None, None)
        emitted, num_emitted = round_commit(
            tree.tokens,
            Verdicts(path, accepted.counts, accepted.bonus),
            LoggedTrees(tree.depths, tree.valid, tree.can_emit),
            TextBatch(self.tokens, self.cache.lengths, self.active, self.tokens_left, self.stops),
            RoundBuffers(
                self.log.lines,
                self.log.next_lines,
                None if buffer is None else buffer.tokens,
                buffer_counts,
            ),
        )
        moves = buffer is not None and buffer.hidden.numel() > 0
        self.cache.commit(
            path,
            num_emitted,
            features.hidden if moves else None,
            buffer.hidden if moves and buffer is not None else None,
            are_counted=True,
        )
        self.partial = None
        if self.feature_buffers is not None:
            self.new_features, self.num_new = self.feature_buffers
            # only 0 or not matters, and torch.compile would compile again for every number
            self.round = 1
        return emitted, num_emitted


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
    # state between rounds, such as its cache
    drafter_state: dict[str, Any] = field(default_factory=dict)
    # the fixed storage of each tensor among them
    static_tensors: dict[str, Tensor] = field(default_factory=dict)
    num_warm_rounds: int = 0  # rounds run in the shapes that will be captured
    graphs: list[Any] = field(default_factory=list)  # a torch.cuda.CUDAGraph a part

    @property
    def slot_bytes(self) -> float:
        """Return the bytes that a slot of the caches takes; 0 before anything is in them."""
        caches = [self.context.cache, *self.drafter_state.values()]
        num_bytes = sum(
            cache.storage.nbytes
            for cache in caches
            if isinstance(cache, TreeCache) and cache.storage is not None
        )
        return num_bytes / (len(self.context.cache.lengths) * self.context.cache.max_length)
