"""What tree builders that shape trees by measurements are prepared with; decoding/calibration.py measures it."""

import json
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Latency:
    """Seconds by number of nodes, at contexts of a few lengths; between measured sizes linear, beyond them too."""

    verify_seconds: dict[int, dict[int, float]]  # context -> nodes -> a target forward with its acceptance
    step_seconds: dict[int, dict[int, float]]  # context -> nodes -> one more draft step over so many nodes
    start_seconds: float  # the first draft step, which also reads what was accepted

    def verify(self, nodes: float, context: int = 0) -> float:
        return _between(self.verify_seconds[_bucket(self.verify_seconds, context)], nodes)

    def step(self, nodes: float, context: int = 0) -> float:
        return _between(self.step_seconds[_bucket(self.step_seconds, context)], nodes)

    def draft(self, levels: int, width: float, context: int = 0) -> float:
        """A draft of so many levels, every one after the first over `width` nodes."""
        return self.start_seconds + (levels - 1) * self.step(width, context)


@dataclass(frozen=True)
class Calibration:
    """`hits[d][k]`: how often the k-th child at depth d + 1 is the one kept, where the path above it is right."""

    hits: list[list[float]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # places measured at each depth
    latency: Latency | None = None

    @property
    def chances(self) -> list[float]:
        """The same whatever the depth, over all places."""
        weights = np.asarray(self.counts, dtype=float)[:, None]
        return list((np.asarray(self.hits) * weights).sum(0) / weights.sum())

    def save(self, path: Path) -> None:
        latency = None if self.latency is None else vars(self.latency)
        path.write_text(json.dumps({"hits": self.hits, "counts": self.counts, "latency": latency}, indent=1) + "\n")


def _between(table: dict[int, float], nodes: float) -> float:
    """Linear interpolation; beyond the ends the nearest segment goes on."""
    sizes = sorted(table)
    if len(sizes) == 1:
        return table[sizes[0]]
    right = min(max(bisect_left(sizes, nodes), 1), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    return table[low] + (table[high] - table[low]) * (nodes - low) / (high - low)


def _bucket(table: dict[int, Any], context: int) -> int:
    """The nearest measured context that is not shorter, else the longest."""
    return min((length for length in table if length >= context), default=max(table))
