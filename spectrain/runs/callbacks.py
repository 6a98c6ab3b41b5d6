"""Callbacks of a training: functions of a caller that hear of its steps, validations and
checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spectrain.training.metrics import Rows, RunKind, Tracker


class Callback:
    """A listener of a training, which does nothing; a subclass overrides what it needs.

    With several processes only the main one calls it. An exception ends the training as failed.
    """

    def on_step(self, step: int) -> None:
        """Hear of a finished step, counted from 1."""

    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Hear of the metrics of a logged step, which are those of a line of metrics.jsonl."""

    def on_validation(self, step: int, measures: dict[str, Any]) -> None:
        """Hear of a validation on held-out conversations, that before the first step (0) too;
        `measures["forecast"]` is tokens per forward.
        """

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Hear of a checkpoint that was just saved."""


class CallbackTracker(Tracker):
    """A tracker that also calls callbacks."""

    def __init__(self, tracker: Tracker | None, callbacks: Sequence[Callback]) -> None:
        self.tracker = tracker or Tracker()
        self.callbacks = callbacks

    def start_run(
        self, run: Path, config: dict[str, Any], kind: RunKind = "train", step: int = 0
    ) -> None:
        self.tracker.start_run(run, config, kind, step)

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        self.tracker.log_metrics(metrics, step)
        validations = {0: metrics.get("held_out_at_start"), step: metrics.get("held_out")}
        for callback in self.callbacks:
            callback.on_metrics(step, metrics)
            for validated, measures in validations.items():
                if measures is not None:
                    callback.on_validation(validated, measures)

    def log_evaluation(self, summary: dict[str, Any], rows: Rows, folder: Path) -> None:
        self.tracker.log_evaluation(summary, rows, folder)

    def log_comparison(self, comparison: dict[str, Any], rows: Rows, folder: Path) -> None:
        self.tracker.log_comparison(comparison, rows, folder)

    def log_checkpoint(self, path: Path, step: int) -> None:
        self.tracker.log_checkpoint(path, step)
        for callback in self.callbacks:
            callback.on_checkpoint(step, path)

    def log_drafter(self, path: Path) -> None:
        self.tracker.log_drafter(path)

    def finish_run(self, failed: bool = False) -> None:
        self.tracker.finish_run(failed)

    def record_step(self, step: int) -> None:
        """Report a finished step."""
        for callback in self.callbacks:
            callback.on_step(step)
