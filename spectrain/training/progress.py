"""Progress of long tasks: a live line on a terminal; in a log, a line every half minute with the remaining time."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

LOG_SECONDS = 30.0  # seconds between two lines of a log


class Pace:
    """Decides when a log line is due, and estimates the remaining time."""

    def __init__(self, total: int, done: int = 0) -> None:
        self.total, self.num_done_before = total, done
        self.start_time = self.last_log_time = time.monotonic()

    def is_due(self) -> bool:
        """Tell whether the last line is half a minute old, and if so count this as the next line."""
        now = time.monotonic()
        if now - self.last_log_time < LOG_SECONDS:
            return False
        self.last_log_time = now
        return True

    def time_left(self, done: int) -> str:
        """Return the remaining time in words, from the time per finished unit."""
        seconds = (time.monotonic() - self.start_time) / max(1, done - self.num_done_before) * (self.total - done)
        return f"{format_duration(seconds)} left"


def format_duration(seconds: float) -> str:
    """Format a duration in words."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class TrainingProgress:
    """Shows the steps of a training with loss and agreement by depth on its own batches, tokens/s, and acceptance on what was
    held out; nothing at all where it is not enabled."""

    def __init__(self, num_steps: int, step: int, enabled: bool) -> None:
        self.num_steps, self.first_step, self.is_enabled = num_steps, step, enabled
        self.console = Console()
        self.is_live = enabled and self.console.is_terminal
        self.bar = Bar(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[line]}"), TimeRemainingColumn(),
            console=self.console, disable=not self.is_live,
        )  # fmt: skip
        self.task = self.bar.add_task("training", total=num_steps, completed=step, line="")
        self.line, self.pace = "", Pace(num_steps, step)

    def __enter__(self) -> "TrainingProgress":
        self.bar.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.bar.__exit__(*raised)

    def set_num_steps(self, num_steps: int) -> None:
        """Set the estimated number of steps."""
        if num_steps != self.num_steps:
            self.num_steps = self.pace.total = num_steps
            self.bar.update(self.task, total=num_steps)

    def update(self, step: int, metrics: dict[str, Any] | None = None) -> None:
        """Report a finished step, with `metrics` where it is logged."""
        if metrics is not None:
            self.line = _format_line(metrics)
        if self.is_live:
            self.bar.update(self.task, completed=step, line=self.line)
            return
        is_end = metrics is not None and step in (self.num_steps, self.first_step + 1)
        if self.is_enabled and (self.pace.is_due() or is_end):
            print(f"step {step} of {self.num_steps}  {self.line}  {self.pace.time_left(step)}", flush=True)


def _format_line(metrics: dict[str, Any]) -> str:
    agreement = " ".join(f"{value:.2f}" for value in metrics["agreement"])
    loss = "not finite" if metrics["loss"] is None else f"{metrics['loss']:.3f}"
    line = f"on training text: loss {loss}, agreement {agreement}; {metrics['tokens_per_second']:.0f} tokens/s"
    held_out = metrics.get("held_out")
    if held_out and held_out["acceptance"]:  # what copies is asked for no distribution
        rates = " ".join(f"{value:.2f}" for value in held_out["acceptance"])
        line += f"; held out: acceptance {rates}, so {held_out['forecast']:.2f} tokens a forward"
    return line + (f"  {metrics['left_out']} rows left out" if metrics.get("left_out") else "")
