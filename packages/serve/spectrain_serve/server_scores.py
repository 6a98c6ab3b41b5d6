"""What the core finds here to score servers; it is imported when a server is scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spectrain.config.spec import RunSpec
from spectrain.runs.server_scores import ServerScores


def score_server(config: Mapping[str, Any]) -> dict[str, Any]:
    from .scoring.command import score_server

    return score_server(config)


def score_in_engine(spec: RunSpec, run: Path) -> None:
    from .scoring.installed import score_in_engine

    score_in_engine(spec, run)


def compare_engines(run: Path, names: str | Sequence[str], folder: Path) -> dict[str, Any]:
    from .scoring.engine_comparison import compare_engines

    return compare_engines(run, names, folder)


def print_engines(comparison: dict[str, Any]) -> None:
    from .scoring.engine_comparison import print_engines

    print_engines(comparison)


def simulate_load(
    times: Mapping[str, Any], bound_ms: float, num_tokens: int | None
) -> dict[str, Any]:
    from .times.schedule import simulate_server

    return simulate_server(times, bound_ms, num_tokens)


SERVER_SCORES = ServerScores(
    score_server, score_in_engine, compare_engines, print_engines, simulate_load
)
