"""The live line of a training: loss, agreement by depth, tokens/s, time left. Plain lines where there is no terminal."""

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """Shows steps as they are logged, and nothing at all where it is not enabled."""

    def __init__(self, num_steps: int, step: int, enabled: bool) -> None:
        self.num_steps, self.first, self.enabled = num_steps, step, enabled
        self.console = Console()
        self.live = enabled and self.console.is_terminal
        self.bar = Bar(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[line]}"), TimeRemainingColumn(),
            console=self.console, disable=not self.live,
        )  # fmt: skip
        self.task: TaskID | None = None
        self.began = self.printed = time.monotonic()

    def __enter__(self) -> "Progress":
        self.bar.__enter__()
        self.task = self.bar.add_task("training", total=self.num_steps, completed=self.first, line="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.__exit__(kind, error, trace)

    def update(self, step: int, metrics: dict[str, Any]) -> None:
        agreement = " ".join(f"{value:.2f}" for value in metrics["agreement"])
        loss = "not finite" if metrics["loss"] is None else f"{metrics['loss']:.3f}"
        line = f"loss {loss}  agreement {agreement}  {metrics['tokens_per_second']:.0f} tokens/s"
        line += f"  {metrics['left_out']} rows left out" if metrics.get("left_out") else ""
        now = time.monotonic()
        if self.live:
            assert self.task is not None
            self.bar.update(self.task, completed=step, line=line)
        elif self.enabled and (now - self.printed > 10 or step in (self.num_steps, self.first + 1)):
            left = (now - self.began) / max(1, step - self.first) * (self.num_steps - step)
            self.printed = now
            print(f"step {step} of {self.num_steps}  {line}  {left:.0f} s left", flush=True)
