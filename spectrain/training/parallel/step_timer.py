"""What the time of training steps goes to: data, the target's features, the drafter, and waiting
for other processes.

On a GPU a mark is an event in the stream of the kernels, and the events of a step are read at the
end of the next step or where metrics are collected. By then the host has waited for the device
anyway, to check the gradients or to read the losses, so timing adds no synchronization to a step.
On a CPU a mark is the clock's time.
"""

import statistics
import time
from typing import Any

import torch

# Seconds on one process by what they went to. `data`: reading, tokenizing and batching. `target`:
# computing or receiving its features. `drafter`: losses, gradients and the optimizer. `others`:
# waiting for other processes and exchanging with them, as far as that does not overlap with
# computing.
StepTimes = dict[str, float]
STEP_PARTS = ("data", "target", "drafter", "others")


class StepTimer:
    """Marks the points of a step at which one kind of work ends and the next begins.

    `features` is where the features of all batches are made, `together` where all processes have
    them, `computed` where this process has its own gradients, `exchanged` where it has those of all
    processes, and `end` the end of the optimizer's step.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        self.marks: dict[str, Any] = {}
        self.data_seconds = 0.0
        # Steps that have ended and were not read: seconds of the data, and marks.
        self.ended: list[tuple[float, dict[str, Any]]] = []

    def start(self, data_seconds: float) -> None:
        """Begin a step, whose data took these seconds of the host's time to read."""
        self.marks = {}
        self.data_seconds = data_seconds
        self.mark("start")

    def end(self) -> None:
        """End the step."""
        self.mark("end")
        self.ended.append((self.data_seconds, self.marks))

    def mark(self, name: str) -> None:
        """Mark a point of the step; the last mark of a name counts."""
        if self.is_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks[name] = event
        else:
            self.marks[name] = time.perf_counter()

    def mark_first(self, name: str) -> None:
        """Mark a point of the step unless it has been marked."""
        if name not in self.marks:
            self.mark(name)

    def take_times(self, with_newest: bool) -> StepTimes:
        """Return the times of the steps that have ended, each once, with or without the newest,
        whose end is waited for.
        """
        taken = self.ended if with_newest else self.ended[:-1]
        self.ended = self.ended[len(taken) :]
        times = [self._step_times(*step) for step in taken]
        return {name: sum(own[name] for own in times) for name in STEP_PARTS}

    def _step_times(self, data_seconds: float, marks: dict[str, Any]) -> StepTimes:
        if self.is_gpu:
            marks["end"].synchronize()
        computed = marks.get("computed", marks["end"])
        exchanged = marks.get("exchanged", computed)
        return {
            "data": data_seconds,
            "target": self._seconds(marks["start"], marks["features"]),
            "drafter": self._seconds(marks["together"], computed)
            + self._seconds(exchanged, marks["end"]),
            "others": self._seconds(marks["features"], marks["together"])
            + self._seconds(computed, exchanged),
        }

    def _seconds(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) / 1e3 if self.is_gpu else last - first


def summarize_processes(times: list[StepTimes], hosts: list[str], steps: int) -> dict[str, Any]:
    """Return mean seconds per step over all processes and, of several, the slowest one.

    The steps of all processes take equally long, so the slowest one is the one that waited least
    for the others.
    """
    per_step = [{name: own.get(name, 0.0) / max(1, steps) for name in STEP_PARTS} for own in times]
    means = {name: round(statistics.mean(own[name] for own in per_step), 6) for name in STEP_PARTS}
    if len(times) == 1:
        del means["others"]
        return {"step_seconds": means}
    busy = [sum(seconds for name, seconds in own.items() if name != "others") for own in per_step]
    slowest = busy.index(max(busy))
    median = statistics.median(busy[:slowest] + busy[slowest + 1 :])
    named = {"rank": slowest, "host": hosts[slowest]}
    return {
        "step_seconds": means,
        "slowest": {**named, "busy": round(busy[slowest], 6), "others_busy": round(median, 6)},
    }
