"""The progress line of a regeneration: conversations, tokens/s, failures, time left. Without a
terminal it prints plain lines."""

import time
from typing import Any

from spectrain.data.shards import FailedRow, Row, Shard, ShardSet
from spectrain.output.console import make_console
from spectrain.output.progress_line import ProgressLine
from spectrain.training.metrics import Pace


class WritingProgress:
    """Counts what this process writes; if enabled, shows it together with what other processes
    have finished.
    """

    def __init__(self, shards: ShardSet, due: list[str], enabled: bool) -> None:
        # The names of the shards that are still to be written.
        self.shards = shards
        self.due = set(due)
        self.enabled = enabled
        self.total = shards.manifest["conversations"]
        self.num_written = self.num_tokens = self.num_failed = 0  # by this process
        # Conversations in unfinished shards of this process.
        self.num_open = 0
        self.num_finished = self._count_finished()
        self.line = ProgressLine(
            "regenerating", self.total, make_console(), self.num_finished, enabled=enabled
        )
        self.start_time, self.pace = time.monotonic(), Pace(self.total, self.num_finished)

    def __enter__(self) -> "WritingProgress":
        self.line.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.line.__exit__(*raised)

    def begin_shard(self, shard: Shard) -> None:
        """Start a shard, with the rows of an earlier attempt."""
        self.num_open += len(shard.rows)
        self.pace.num_done_before += len(shard.rows)

    def count_outcome(self, outcome: Row | FailedRow) -> None:
        self.num_written += 1
        self.num_open += 1
        if isinstance(outcome, Row):
            self.num_tokens += sum(outcome.num_tokens)
        else:
            self.num_failed += 1
        done = self.num_finished + self.num_open
        seconds = time.monotonic() - self.start_time
        line = f"{self.num_tokens / max(1e-9, seconds):.0f} tokens/s  {self.num_failed} failed"
        if self.line.is_live:
            self.line.update(done, f"{done} of {self.total}", line)
        elif self.enabled and self.pace.is_due():
            print(
                f"conversation {done} of {self.total}  {line}  {self.pace.time_left(done)}",
                flush=True,
            )

    def finish_shard(self, shard: Shard) -> None:
        self.due.discard(shard.name)
        self.num_open -= len(shard.pending)
        self.num_finished = self._count_finished()

    @property
    def summary_line(self) -> str:
        seconds = time.monotonic() - self.start_time
        speed = f"{self.num_tokens / max(1e-9, seconds):.0f} a second"
        return (
            f"this time {self.num_written} conversations, {self.num_tokens} tokens in "
            f"{seconds:.0f} s ({speed})"
        )

    def _count_finished(self) -> int:
        """Count the conversations of shards that are not to be written again, of all processes."""
        records = self.shards.manifest["shards"].items()
        return sum(
            record["rows"] + sum(record["lost"].values())
            for name, record in records
            if name not in self.due
        )
