"""Where metrics go: always metrics.jsonl and the terminal; W&B when it is configured."""

import json
import os
from pathlib import Path
from typing import Any

from .checkpoints import written_file


class Tracker:
    """No tracker besides the run folder."""

    def start(self, run: Path, config: dict[str, Any]) -> None: ...

    def log(self, metrics: dict[str, Any], step: int) -> None: ...

    def finish(self) -> None: ...


class Wandb(Tracker):
    """Weights & Biases, offline where there is no account; it never asks."""

    def __init__(self, project: str = "spectrain", entity: str | None = None, mode: str | None = None) -> None:
        self.project, self.entity, self.mode = project, entity, mode
        self.session: Any = None

    def start(self, run: Path, config: dict[str, Any]) -> None:
        import wandb

        account = os.environ.get("WANDB_API_KEY") or (Path.home() / ".netrc").exists()
        mode: Any = self.mode or os.environ.get("WANDB_MODE") or ("online" if account else "offline")
        self.session = wandb.init(
            project=self.project, entity=self.entity, name=run.name, dir=str(run), config=config, mode=mode, resume="allow",
            id=run.name.replace("/", "-"),
        )  # fmt: skip

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.session.log(flatten(metrics), step=step)

    def finish(self) -> None:
        self.session.finish()


def flatten(metrics: dict[str, Any]) -> dict[str, Any]:
    """Nested metrics as curves of their own: agreement/1, time_share/target."""
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, list):
            flat |= {f"{name}/{number}": entry for number, entry in enumerate(value, 1)}
        elif isinstance(value, dict):
            flat |= {f"{name}/{key}": entry for key, entry in value.items()}
        else:
            flat[name] = value
    return flat


class MetricsFile:
    """metrics.jsonl: one line a logged step. After a resume, steps that will be done again are dropped first."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if _step(line) is not None and _step(line) <= step]  # type: ignore[operator]
            with written_file(path) as scratch:
                scratch.write_text("".join(line + "\n" for line in kept))

    def write(self, metrics: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(metrics) + "\n")


def _step(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return None  # a kill cut this line short
