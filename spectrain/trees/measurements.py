"""Measurements that tree builders are prepared with; decoding/calibration.py makes them."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spectrain.files import write_text

TIMED_SIZES = (1, 2, 4, 8, 16, 32, 64)
# Verifications of each size that are timed before a round, after a first one, and the factor of the
# smallest tree's time above which no larger tree is timed.
NUM_TIMED = 2
LARGEST_FACTOR = 2.5


def list_timed_sizes(budget: int) -> list[int]:
    """Return the tree sizes to time for trees of up to `budget` nodes."""
    return [size for size in TIMED_SIZES if size < budget] + [budget]


@dataclass(frozen=True)
class Latency:
    """Seconds by number of nodes and context length.

    Times are interpolated linearly between measured sizes and extrapolated beyond them; between
    measured context lengths they are interpolated, and beyond these the nearest length holds.
    """

    # context -> nodes -> one target forward with acceptance
    verify_seconds: dict[int, dict[int, float]]
    step_seconds: dict[int, dict[int, float]]  # context -> nodes -> one further draft step
    start_seconds: float  # the first draft step, which also reads accepted tokens
    # added time per level after the first, where layers keep a state and run level by level
    level_seconds: float = 0.0
    batch: int = 1  # prompts that were decoded together

    def for_batch(self, batch: int) -> Latency:
        """Estimate the times for another number of prompts, as those of one tree of as many
        nodes as all trees have.
        """
        share = batch / self.batch
        if share == 1:
            return self
        verify, step = (
            {
                length: {size: _interpolate_nodes(times, size * share) for size in times}
                for length, times in table.items()
            }
            for table in (self.verify_seconds, self.step_seconds)
        )
        longer = self.estimate_step(share) / max(self.estimate_step(1), 1e-9)
        return Latency(
            verify, step, self.start_seconds * max(1.0, longer), self.level_seconds, batch
        )

    def estimate_verify(self, nodes: float, context: int = 0) -> float:
        return _interpolate_context(self.verify_seconds, context, nodes)

    def estimate_step(self, nodes: float, context: int = 0) -> float:
        return _interpolate_context(self.step_seconds, context, nodes)

    def estimate_draft(self, levels: int, width: float, context: int = 0) -> float:
        """Estimate the seconds of a draft of `levels` levels, each after the first over `width`
        nodes.
        """
        return self.start_seconds + (levels - 1) * self.estimate_step(width, context)

    def estimate_timing(self, sizes: Sequence[int], context: int = 0) -> float:
        """Estimate the seconds that it takes to time the verification of trees of these sizes,
        which ascend.
        """
        seconds = [self.estimate_verify(size, context) for size in sizes]
        num_timed = 1 + sum(value <= LARGEST_FACTOR * seconds[0] for value in seconds[:-1])
        return (1 + NUM_TIMED) * sum(seconds[:num_timed])

    def estimate_levels(self, levels: int) -> float:
        """Estimate the added seconds of verifying `levels` levels compared with one level of as
        many nodes.
        """
        return max(0, levels - 1) * self.level_seconds


@dataclass(frozen=True)
class RuleForecast:
    """Forecast acceptance of two rules that sample the same text from this drafter.

    They are sample-and-match of the most likely children, and rejection sampling by p and q of as
    many children drawn without replacement. The flatter q is, the better is the second.
    """

    children: int  # children of a node
    matched: list[float]  # acceptance of one of them, at each depth
    weighed: list[float]

    @property
    def forecast_lengths(self) -> tuple[float, float]:
        """The expected tokens per target forward of each rule, if depths were independent."""
        return expected_length(self.matched), expected_length(self.weighed)

    @property
    def prefers_rejection(self) -> bool:
        """Whether rejection sampling accepts more, by a margin above the measurement noise."""
        return self.forecast_lengths[1] > 1.03 * self.forecast_lengths[0]

    def summary(self) -> dict[str, Any]:
        matched, weighed = self.forecast_lengths
        return {
            "children": self.children,
            "match": {
                "kept_by_depth": [round(rate, 4) for rate in self.matched],
                "forecast": round(matched, 4),
            },
            "recursive": {
                "kept_by_depth": [round(rate, 4) for rate in self.weighed],
                "forecast": round(weighed, 4),
            },
            "better": "recursive" if self.prefers_rejection else "match",
        }


def expected_length(rates: Sequence[float]) -> float:
    """Return the tokens per target forward where depths are accepted at these rates,
    independently of each other.
    """
    length = product = 1.0
    for rate in rates:
        product *= rate
        length += product
    return length


@dataclass(frozen=True)
class Calibration:
    """`hits[d][k]` is how often the k-th child at depth d + 1 is accepted, given that the path
    above it is.
    """

    hits: list[list[float]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # positions measured at each depth
    latency: Latency | None = None
    rules: RuleForecast | None = None  # where the rule is sample-and-match

    @property
    def pooled_hits(self) -> list[float]:
        """The hits pooled over depths, weighted by their counts."""
        weights = np.asarray(self.counts, dtype=float)[:, None]
        return list((np.asarray(self.hits) * weights).sum(0) / weights.sum())

    def save(self, path: Path) -> None:
        parts = {"latency": self.latency, "rules": self.rules}
        fields = {name: None if part is None else vars(part) for name, part in parts.items()}
        write_text(
            path, json.dumps({"hits": self.hits, "counts": self.counts, **fields}, indent=1) + "\n"
        )


def _interpolate_nodes(table: dict[int, float], nodes: float) -> float:
    """Interpolate linearly; beyond the ends the nearest segment continues."""
    sizes = sorted(table)
    if len(sizes) == 1:
        return table[sizes[0]]
    right = min(max(bisect_left(sizes, nodes), 1), len(sizes) - 1)
    low = sizes[right - 1]
    high = sizes[right]
    return table[low] + (table[high] - table[low]) * (nodes - low) / (high - low)


def _interpolate_context(tables: dict[int, dict[int, float]], context: int, nodes: float) -> float:
    """Interpolate seconds over context lengths; beyond the measured ones the nearest holds."""
    nearest = min(max(context, min(tables)), max(tables))
    return _interpolate_nodes(
        {length: _interpolate_nodes(table, nodes) for length, table in tables.items()}, nearest
    )
