"""Scores of drafters in servers, which an installed package makes. Its entry point is in
`spectrain.server_scores`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    if spec.eval.get("serve_in"):
        require_server_scores("eval.serve_in").score_in_engine(spec, run)
