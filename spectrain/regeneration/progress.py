"""The live line of a regeneration: conversations, tokens/s, losses, time left. Plain lines where there is no terminal."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from spectrain.data.shards import Lost, Row, Shard, Shards
from spectrain.training.progress import Pace


class WritingProgress:
    """Counts what this process writes; shows it, and what other processes have finished, where it is enabled."""

    def __init__(self, shards: Shards, faults: dict[str, str], enabled: bool) -> None:
        self.shards, self.faults, self.enabled = shards, set(faults), enabled
        self.total = shards.manifest["conversations"]
        self.written = self.tokens = self.lost = 0  # by this process
        self.open = 0  # conversations of unfinished shards of this process
        self.finished = self._finished()
        self.console = Console()
        self.live = enabled and self.console.is_terminal
        self.bar = Bar(
            TextColumn("regenerating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[line]}"),
            TimeRemainingColumn(), console=self.console, disable=not self.live,
        )  # fmt: skip
        self.task = self.bar.add_task("", total=self.total, completed=self.finished, line="")
        self.began, self.pace = time.monotonic(), Pace(self.total, self.finished)

    def __enter__(self) -> "WritingProgress":
        self.bar.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.bar.__exit__(*raised)

    def begin(self, shard: Shard) -> None:
        """A shard is taken up, with the rows of an earlier attempt."""
        self.open += len(shard.rows)
        self.pace.first += len(shard.rows)

    def count(self, outcome: Row | Lost) -> None:
        self.written += 1
        self.open += 1
        if isinstance(outcome, Row):
            self.tokens += sum(outcome.num_tokens)
        else:
            self.lost += 1
        done, seconds = self.finished + self.open, time.monotonic() - self.began
        line = f"{self.tokens / max(1e-9, seconds):.0f} tokens/s  {self.lost} lost"
        if self.live:
            self.bar.update(self.task, completed=done, line=line)
        elif self.enabled and self.pace.is_due():
            print(f"conversation {done} of {self.total}  {line}  {self.pace.left(done)}", flush=True)

    def finish(self, shard: Shard) -> None:
        self.faults.discard(shard.name)
        self.open -= len(shard.wanted)
        self.finished = self._finished()

    @property
    def summary(self) -> str:
        seconds = time.monotonic() - self.began
        speed = f"{self.tokens / max(1e-9, seconds):.0f} a second"
        return f"this time {self.written} conversations, {self.tokens} tokens in {seconds:.0f} s ({speed})"

    def _finished(self) -> int:
        """Conversations of whole shards, whoever made them."""
        records = self.shards.manifest["shards"].items()
        return sum(record["rows"] + sum(record["lost"].values()) for name, record in records if name not in self.faults)
