"""What tree builders that shape trees by measurements are prepared with; decoding/calibration.py measures it."""

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spectrain.files import write_text


@dataclass(frozen=True)
class Latency:
    """Seconds by number of nodes, behind contexts of a few lengths; between measured sizes linear, beyond them too, and between
    measured lengths, beyond which those of the nearest hold."""

    verify_seconds: dict[int, dict[int, float]]  # context -> nodes -> a target forward with its acceptance
    step_seconds: dict[int, dict[int, float]]  # context -> nodes -> one more draft step over so many nodes
    start_seconds: float  # the first draft step, which also reads what was accepted
    level_seconds: float = 0.0  # each level of a tree below the first, where layers keep a state and run it level by level

    def estimate_verify(self, nodes: float, context: int = 0) -> float:
        return _interpolate_context(self.verify_seconds, context, nodes)

    def estimate_step(self, nodes: float, context: int = 0) -> float:
        return _interpolate_context(self.step_seconds, context, nodes)

    def estimate_draft(self, levels: int, width: float, context: int = 0) -> float:
        """A draft of so many levels, every one after the first over `width` nodes."""
        return self.start_seconds + (levels - 1) * self.estimate_step(width, context)

    def estimate_levels(self, levels: int) -> float:
        """What verifying a tree of so many levels below its root takes more than one with a single level and as many nodes."""
        return max(0, levels - 1) * self.level_seconds


@dataclass(frozen=True)
class RuleForecast:
    """What two ways of sampling the same text would keep of this drafter: sample-and-match of the likeliest children, and
    weighing p against q where as many children are drawn without replacement. The flatter q is, the better is the second."""

    children: int  # of a node
    matched: list[float]  # how often one of them is kept, at each depth
    weighed: list[float]

    @property
    def forecast_lengths(self) -> tuple[float, float]:
        """Tokens a forward that either promises, if depths were independent."""
        return expected_length(self.matched), expected_length(self.weighed)

    @property
    def prefers_rejection(self) -> bool:
        """Whether drawing keeps more, beyond what so few places can tell."""
        return self.forecast_lengths[1] > 1.03 * self.forecast_lengths[0]

    def summary(self) -> dict[str, Any]:
        matched, weighed = self.forecast_lengths
        return {
            "children": self.children,
            "match": {"kept_by_depth": [round(rate, 4) for rate in self.matched], "forecast": round(matched, 4)},
            "recursive": {"kept_by_depth": [round(rate, 4) for rate in self.weighed], "forecast": round(weighed, 4)},
            "better": "recursive" if self.prefers_rejection else "match",
        }


def expected_length(rates: Sequence[float]) -> float:
    """Tokens a forward where depths are kept at these rates, independently of each other."""
    length = product = 1.0
    for rate in rates:
        product *= rate
        length += product
    return length


@dataclass(frozen=True)
class Calibration:
    """`hits[d][k]`: how often the k-th child at depth d + 1 is the one kept, where the path above it is right."""

    hits: list[list[float]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # places measured at each depth
    latency: Latency | None = None
    rules: RuleForecast | None = None  # where the rule is sample-and-match

    @property
    def pooled_hits(self) -> list[float]:
        """The same whatever the depth, over all places."""
        weights = np.asarray(self.counts, dtype=float)[:, None]
        return list((np.asarray(self.hits) * weights).sum(0) / weights.sum())

    def save(self, path: Path) -> None:
        parts = {"latency": self.latency, "rules": self.rules}
        known = {name: None if part is None else vars(part) for name, part in parts.items()}
        write_text(path, json.dumps({"hits": self.hits, "counts": self.counts, **known}, indent=1) + "\n")


def _interpolate_nodes(table: dict[int, float], nodes: float) -> float:
    """Linear interpolation; beyond the ends the nearest segment goes on."""
    sizes = sorted(table)
    if len(sizes) == 1:
        return table[sizes[0]]
    right = min(max(bisect_left(sizes, nodes), 1), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    return table[low] + (table[high] - table[low]) * (nodes - low) / (high - low)


def _interpolate_context(tables: dict[int, dict[int, float]], context: int, nodes: float) -> float:
    """Of so many nodes behind a context: between the measured lengths linear, beyond them that of the nearest."""
    nearest = min(max(context, min(tables)), max(tables))
    return _interpolate_nodes({length: _interpolate_nodes(table, nodes) for length, table in tables.items()}, nearest)
