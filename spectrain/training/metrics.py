"""What a training reports: metrics.jsonl, and the base of what else it may report to."""

import json
from pathlib import Path
from typing import Any, Literal

from spectrain.files import full_disk_named, write_text

Kind = Literal["train", "eval", "compare"]


class Tracker:
    """No tracker besides the run folder. Only the main process calls one: `start`, then any of the others, then `finish`."""

    def start(self, run: Path, config: dict[str, Any], kind: Kind = "train", step: int = 0) -> None:
        """Open what a run folder's numbers go to; `step` steps are done already."""

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """A logging interval of training."""

    def scored(self, summary: dict[str, Any], folder: Path) -> None:
        """An evaluation: its summary.json, and the folder that this and its other files are in."""

    def compared(self, comparison: dict[str, Any], folder: Path) -> None:
        """A comparison of runs: its comparison.json, and the folder that this and report.html are in."""

    def checkpoint(self, path: Path, step: int) -> None:
        """A checkpoint that was just saved."""

    def drafter(self, path: Path) -> None:
        """The directory of the trained drafter."""

    def finish(self, failed: bool = False) -> None:
        """Send what is left and close; `failed` is a run that an exception ended."""


class MetricsFile:
    """metrics.jsonl: one line a logged step. After a resume, steps that will be done again are dropped first."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if _step(line) is not None and _step(line) <= step]  # type: ignore[operator]
            write_text(path, "".join(line + "\n" for line in kept))

    def write(self, metrics: dict[str, Any]) -> None:
        with full_disk_named(self.path, "go on with trainer.resume=auto"), self.path.open("a") as file:
            file.write(json.dumps(metrics) + "\n")


def last_step(path: Path) -> int:
    """The last step that a metrics.jsonl holds; 0 where it holds none."""
    return max((_step(line) or 0 for line in path.read_text().splitlines()), default=0) if path.exists() else 0


def logged_metrics(path: Path, step: int) -> list[dict[str, Any]]:
    """What a metrics.jsonl holds up to a step."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if 0 < (_step(line) or 0) <= step]


def _step(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return None  # a kill cut this line short
