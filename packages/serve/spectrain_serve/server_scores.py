"""What the core finds here to score servers; it is imported when a server is scored."""

from __future__ import annotations

from collections.abc import Mapping
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


SERVER_SCORES = ServerScores(score_server, score_in_engine)
