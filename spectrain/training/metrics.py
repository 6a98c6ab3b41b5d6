"""Metrics of a training run: metrics.jsonl, the base class of trackers, and the line of progress
on a terminal or in a log.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from spectrain.files import (
    explain_failed_write,
    iterate_lines,
    open_in_place,
    require_regular_file,
    write_text,
)
from spectrain.output.console import make_console
from spectrain.output.progress_line import ProgressLine, format_duration
from spectrain.output.text import mask_settings

METRICS_NAME = "metrics.jsonl"
"""File of a run with its metrics, a line for each logged step."""

RunKind = Literal["train", "eval", "compare"]
Rows = list[dict[str, Any]]
# Share of the time from which a line of progress says that training waits for data.
REPORTED_SHARE = 0.05
# Seconds between two lines of a log.
LOG_SECONDS = 30.0


class Tracker:
    """A tracker that does nothing. Only the main process calls one: `start_run`, then any other
    method, then `finish_run`.
    """

    def start_run(
        self, run: Path, config: dict[str, Any], kind: RunKind = "train", step: int = 0
    ) -> None:
        """Open the tracker for a run folder, after `step` finished steps."""

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        """Log the metrics of a logging interval."""

    def log_evaluation(self, summary: dict[str, Any], rows: Rows, folder: Path) -> None:
        """Log an evaluation: its summary.json, a row of values for each system, and the folder
        of its files.
        """

    def log_comparison(self, comparison: dict[str, Any], rows: Rows, folder: Path) -> None:
        """Log a comparison of runs: its comparison.json, a row of values for each system of each
        run, and the folder.
        """

    def log_checkpoint(self, path: Path, step: int) -> None:
        """Log a checkpoint that was just saved."""

    def log_drafter(self, path: Path) -> None:
        """Log the directory of the trained drafter."""

    def finish_run(self, failed: bool = False) -> None:
        """Send the remaining data and close. `failed` marks a run that an exception ended."""


@contextmanager
def track_run(
    tracker: Tracker | None,
    run: Path,
    config: dict[str, Any],
    kind: RunKind = "train",
    step: int = 0,
) -> Iterator[Tracker]:
    """Start a tracker and finish it at the end; an exception marks the run as failed."""
    tracker = tracker or Tracker()
    try:
        tracker.start_run(run, mask_settings(config), kind, step)
        yield tracker
    except BaseException:
        tracker.finish_run(failed=True)
        raise
    tracker.finish_run()


class MetricsFile:
    """metrics.jsonl: one line per logged step. After a resume, steps that will run again are
    dropped first.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        if path.exists():
            lines = [
                line
                for line in _read_lines(path)
                if (number := _parse_step(line)) is not None and number <= step
            ]
            write_text(path, "".join(line + "\n" for line in lines))

    def write(self, metrics: dict[str, Any]) -> None:
        with (
            explain_failed_write(self.path, "go on with trainer.resume=auto"),
            open(self.path, "a", opener=open_in_place) as file,
        ):
            file.write(json.dumps(metrics) + "\n")


def read_last_step(path: Path) -> int:
    """Return the last step in a metrics.jsonl, or 0 where it holds none."""
    if not path.exists():
        return 0
    return max((_parse_step(line) or 0 for line in _read_lines(path)), default=0)


def read_metrics(path: Path, step: int) -> list[dict[str, Any]]:
    """Read the lines of a metrics.jsonl up to a step."""
    lines = _read_lines(path) if path.exists() else []
    return [json.loads(line) for line in lines if 0 < (_parse_step(line) or 0) <= step]


def _read_lines(path: Path) -> list[str]:
    """Read the lines of a file, whose bytes need not all be text."""
    require_regular_file(path)
    with path.open(errors="replace") as file:
        return [line.rstrip("\n") for line in iterate_lines(file, path)]


def _parse_step(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    # A kill cut the line short, or it is not a step's.
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


class Pace:
    """Decides when a log line is due, and estimates the remaining time."""

    def __init__(self, total: int, done: int = 0) -> None:
        self.total = total
        self.num_done_before = done
        self.start_time = self.last_log_time = time.monotonic()

    def is_due(self) -> bool:
        """Tell whether the last line is half a minute old, and if so count this as the next
        line.
        """
        now = time.monotonic()
        if now - self.last_log_time < LOG_SECONDS:
            return False
        self.last_log_time = now
        return True

    def time_left(self, done: int) -> str:
        """Return the remaining time in words, from the time per finished unit."""
        seconds = (
            (time.monotonic() - self.start_time)
            / max(1, done - self.num_done_before)
            * (self.total - done)
        )
        return f"{format_duration(seconds)} left"


class TrainingProgress:
    """Shows the steps of a training with loss and agreement by depth on its own batches, tokens/s,
    and acceptance on what was held out; nothing at all where it is not enabled."""

    def __init__(self, num_steps: int, step: int, enabled: bool) -> None:
        self.num_steps = num_steps
        self.first_step = step
        self.is_enabled = enabled
        self.bar = ProgressLine("training", num_steps, make_console(), step, enabled=enabled)
        self.line = self.loss = self.count = ""
        self.pace = Pace(num_steps, step)

    def __enter__(self) -> "TrainingProgress":
        self.bar.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.bar.__exit__(*raised)
        if self.bar.is_live and self.line:
            # Nothing of the bar remains.
            print(f"step {self.count}  {self.line}", flush=True)

    def set_num_steps(self, num_steps: int) -> None:
        """Set the estimated number of steps."""
        if num_steps != self.num_steps:
            self.num_steps = self.pace.total = num_steps

    def update(
        self,
        step: int,
        metrics: dict[str, Any] | None = None,
        seconds_left: float | None = None,
        is_paced: bool = True,
    ) -> None:
        """Report a finished step, with `metrics` where it is logged.

        `seconds_left` is what a time limit leaves; before steps are timed (not `is_paced`) their
        number is not shown.
        """
        if metrics is not None:
            self.line = _format_line(metrics)
        if self.bar.is_live:
            self._draw(step, metrics, seconds_left, is_paced)
            return
        is_end = metrics is not None and step in (self.num_steps, self.first_step + 1)
        if self.is_enabled and (self.pace.is_due() or is_end):
            count = f"step {step} of {self.num_steps}" if is_paced else f"step {step}"
            left = (
                self.pace.time_left(step)
                if seconds_left is None
                else f"{format_duration(seconds_left)} left"
            )
            print(f"{count}  {self.line}  {left}", flush=True)

    def _draw(
        self,
        step: int,
        metrics: dict[str, Any] | None,
        seconds_left: float | None,
        is_paced: bool,
    ) -> None:
        """Draw step, loss and time left, then what else fits; a validation gets its own line above,
        which stays.
        """
        self.bar.total = self.num_steps if is_paced else None
        self.count = f"{step}/{self.num_steps}" if is_paced else f"{step}"
        if metrics is not None:
            self.loss = _format_loss(metrics)
            rates = _format_rates(metrics)
            self.bar.text = f"{rates}{_format_waits(metrics)}{_format_omitted(metrics)}"
            if held_out := _format_held_out(metrics):
                self.bar.live.console.print(f"step {step}: {held_out}", highlight=False)
        self.bar.update(step, f"{self.count}  {self.loss}", seconds_left=seconds_left)


def _format_line(metrics: dict[str, Any]) -> str:
    held_out = _format_held_out(metrics)
    return (
        f"on training text: {_format_loss(metrics)}, {_format_rates(metrics)}"
        f"{f'; {held_out}' if held_out else ''}{_format_waits(metrics)}"
        f"{_format_omitted(metrics)}"
    )


def _format_loss(metrics: dict[str, Any]) -> str:
    return "loss not finite" if metrics["loss"] is None else f"loss {metrics['loss']:.3f}"


def _format_rates(metrics: dict[str, Any]) -> str:
    agreement = " ".join(f"{value:.2f}" for value in metrics["agreement"])
    return f"agreement {agreement}; {metrics['tokens_per_second']:.0f} tokens/s"


def _format_omitted(metrics: dict[str, Any]) -> str:
    return f"  {metrics['left_out']} rows left out" if metrics.get("left_out") else ""


def _format_held_out(metrics: dict[str, Any]) -> str:
    """Describe what a validation measured; "" where there was none."""
    held_out = metrics.get("held_out")
    if not held_out or not held_out["agreement"]:
        return ""
    rates = " ".join(f"{value:.2f}" for value in held_out["agreement"])
    return f"held out: agreement {rates}, forecast {held_out['forecast']:.2f} tokens per forward"


def _format_waits(metrics: dict[str, Any]) -> str:
    """Describe the shares of the time that went to data, to the target and to waiting for other
    processes, and the slowest.
    """
    share = metrics.get("time_share", {})
    slowest = metrics.get("slowest")
    parts = (
        [f"data {share['data']:.0%}"] if share.get("data", 0.0) >= REPORTED_SHARE or slowest else []
    )
    if slowest is None:
        return f"; waits: {parts[0]}" if parts else ""
    parts += [f"target {share['target']:.0%}", f"other processes {share['others']:.0%}"]
    ratio = slowest["busy"] / max(slowest["others_busy"], 1e-9)
    return (
        f"; waits: {', '.join(parts)}; slowest: rank {slowest['rank']} ({slowest['host']}), "
        f"{ratio:.1f}x the others' time"
    )
