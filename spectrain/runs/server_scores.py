"""Scores of drafters in servers, which an installed package makes. Its entry point is in
`spectrain.server_scores`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrain.config.installed import load_entry_points
from spectrain.config.missing import explain_missing
from spectrain.config.spec import RunSpec
from spectrain.errors import UserError

ENTRY_POINTS = "server_scores"


@dataclass(frozen=True)
class ServerScores:
    """What an installed package does with servers."""

    # Scores the server that the settings of `spectrain eval` name; returns the content of
    # summary.json.
    score_server: Callable[[Mapping[str, Any]], dict[str, Any]]
    # Scores the drafter of a run folder in the engine that eval.serve_in names, and prints the
    # result.
    score_in_engine: Callable[[RunSpec, Path], None]
    # Compares the scores of a run folder that compare.scores names, which engines made; returns
    # the content of comparison.json, whose paths are relative to the last folder.
    compare_engines: Callable[[Path, str | Sequence[str], Path], dict[str, Any]]
    # Prints the table of such a comparison.
    print_engines: Callable[[dict[str, Any]], None]
    # Simulates a server under load: from its measured times, the bound of the time between tokens
    # in milliseconds, and the draft tokens of a chain (None for other trees), returns the entry
    # `load` of a sweep over batch sizes.
    simulate_load: Callable[[Mapping[str, Any], float, int | None], dict[str, Any]]


def require_server_scores(setting: str) -> ServerScores:
    """Return what scores servers; a UserError says which package has it, which `setting` needs."""
    installed: tuple[ServerScores, ...] = load_entry_points(ENTRY_POINTS)
    if not installed:
        raise UserError(str(explain_missing("group.", ENTRY_POINTS, setting)))
    return installed[0]


def score_server(config: Mapping[str, Any]) -> dict[str, Any]:
    """Score the server that the settings of `spectrain eval` name; return the content of
    summary.json.
    """
    return require_server_scores("`spectrain eval` with a server").score_server(config)


def score_in_engine(spec: RunSpec, run: Path) -> None:
    """Score the drafter of a run also in the engine that eval.serve_in names, if it names one."""
    if spec.eval.settings.get("serve_in"):
        require_server_scores("eval.serve_in").score_in_engine(spec, run)


def simulate_load(
    times: Mapping[str, Any], bound_ms: float, num_tokens: int | None
) -> dict[str, Any] | None:
    """Simulate a server under load, as `ServerScores.simulate_load` says; None where no installed
    package does.
    """
    installed: tuple[ServerScores, ...] = load_entry_points(ENTRY_POINTS)
    return installed[0].simulate_load(times, bound_ms, num_tokens) if installed else None
