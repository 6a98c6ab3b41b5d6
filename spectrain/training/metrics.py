"""Metrics of a training run: metrics.jsonl, and the base class of trackers."""

import json
from pathlib import Path
from typing import Any, Literal

from spectrain.files import explain_full_disk, write_text

RunKind = Literal["train", "eval", "compare"]
Rows = list[dict[str, Any]]


class Tracker:
    """A tracker that does nothing. Only the main process calls one: `start_run`, then any other method, then `finish_run`."""

    def start_run(self, run: Path, config: dict[str, Any], kind: RunKind = "train", step: int = 0) -> None:
        """Open the tracker for a run folder, after `step` finished steps."""

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        """Log the metrics of a logging interval."""

    def log_evaluation(self, summary: dict[str, Any], rows: Rows, folder: Path) -> None:
        """Log an evaluation: its summary.json, a row of values for each system, and the folder of its files."""

    def log_comparison(self, comparison: dict[str, Any], rows: Rows, folder: Path) -> None:
        """Log a comparison of runs: its comparison.json, a row of values for each system of each run, and the folder."""

    def log_checkpoint(self, path: Path, step: int) -> None:
        """Log a checkpoint that was just saved."""

    def log_drafter(self, path: Path) -> None:
        """Log the directory of the trained drafter."""

    def finish_run(self, failed: bool = False) -> None:
        """Send the remaining data and close. `failed` marks a run that an exception ended."""


class MetricsFile:
    """metrics.jsonl: one line per logged step. After a resume, steps that will run again are dropped first."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        if path.exists():
            lines = [
                line for line in path.read_text().splitlines() if (number := _parse_step(line)) is not None and number <= step
            ]
            write_text(path, "".join(line + "\n" for line in lines))

    def write(self, metrics: dict[str, Any]) -> None:
        with explain_full_disk(self.path, "go on with trainer.resume=auto"), self.path.open("a") as file:
            file.write(json.dumps(metrics) + "\n")


def read_last_step(path: Path) -> int:
    """Return the last step in a metrics.jsonl, or 0 where it holds none."""
    return max((_parse_step(line) or 0 for line in path.read_text().splitlines()), default=0) if path.exists() else 0


def read_metrics(path: Path, step: int) -> list[dict[str, Any]]:
    """Read the lines of a metrics.jsonl up to a step."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if 0 < (_parse_step(line) or 0) <= step]


def _parse_step(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return None  # a kill cut this line short
