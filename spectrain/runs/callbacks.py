"""Callbacks of a training: functions of a caller that hear of its steps, validations and
checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spectrain.training.metrics import Tracker


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
    """A tracker of the steps of a training: it passes them on to another one and to callbacks."""

    def __init__(self, tracker: Tracker, callbacks: Sequence[Callback]) -> None:
        self.tracker = tracker
        self.callbacks = callbacks

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        self.tracker.log_metrics(metrics, step)
        validations = {0: metrics.get("held_out_at_start"), step: metrics.get("held_out")}
        for callback in self.callbacks:
            callback.on_metrics(step, metrics)
            for validated, measures in validations.items():
                if measures is not None:
                    callback.on_validation(validated, measures)

    def log_checkpoint(self, path: Path, step: int) -> None:
        self.tracker.log_checkpoint(path, step)
        for callback in self.callbacks:
            callback.on_checkpoint(step, path)

    def record_step(self, step: int) -> None:
        """Report a finished step."""
        for callback in self.callbacks:
            callback.on_step(step)
