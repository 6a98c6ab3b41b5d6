"""How work is timed, and the file that holds the results."""

import json
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.files import write_text
from spectrain.models.device import capture_graph, synchronize_device
from spectrain.provenance import collect_provenance

Work = Callable[[int], Any]
"""One timed call; the number selects one of several equal inputs, so that no cache holds them."""

SampleT = TypeVar("SampleT")
MAX_REPLAY_SECONDS = 0.05
"""Slower work is launched fewer times a replay."""
MACHINE_KEYS = ("gpu", "driver", "processor", "torch", "triton", "dtype", "toy")


def describe_setting(device: torch.device, dtype: torch.dtype, toy: bool) -> dict[str, Any]:
    """Return what all rows of a file have in common: machine, software, and when and how they
    were measured.
    """
    facts = collect_provenance()
    machine = {
        "gpu": facts["hardware"]["gpu"] if device.type == "cuda" else None,
        "processor": facts["hardware"]["processor"],
    }
    software = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": facts["versions"].get("triton"),
    }
    fixed = {
        **machine,
        **query_driver(device),
        **software,
        "dtype": str(dtype).removeprefix("torch."),
        "toy": toy,
    }
    return {**fixed, **{key: facts[key] for key in ("date", "commit", "command", "versions")}}


def query_driver(device: torch.device) -> dict[str, str | None]:
    """Return the GPU's driver, highest clocks and power limit from nvidia-smi."""
    names = {
        "driver": "driver_version",
        "clock": "clocks.max.sm",
        "memory_clock": "clocks.max.mem",
        "power": "power.limit",
    }
    if device.type != "cuda":
        return dict.fromkeys(names)
    query = ["nvidia-smi", f"--query-gpu={','.join(names.values())}", "--format=csv,noheader"]
    try:
        line = subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=30
        ).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return dict.fromkeys(names)
    return dict(zip(names, (part.strip() for part in line.split(","))))


class ResultFile:
    """Rows measured on one machine, in a JSON file that is rewritten after each of them.

    An interrupted run loses at most one row and continues from there. An existing row is measured
    again only where it failed, or where the hash of the measured code, which it carries, has
    changed.
    """

    def __init__(self, path: Path, setting: dict[str, Any]) -> None:
        self.path, self.setting = path, setting
        self.rows: dict[str, dict[str, Any]] = {}
        self.attempts: dict[str, int] = {}  # of work that has begun and not ended
        self.goal_values: dict[str, float] = {}  # goals that the report cannot compute from rows
        if path.exists():
            self._load_rows()

    def _load_rows(self) -> None:
        try:
            content = json.loads(self.path.read_text())
            rows = content["rows"]
            setting = content["setting"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"out={self.path}: it does not hold measured rows; give another name"
            ) from error
        differing = [key for key in MACHINE_KEYS if setting.get(key) != self.setting[key]]
        if differing:
            differences = ", ".join(
                f"{key} {setting.get(key)}, here {self.setting[key]}" for key in differing
            )
            raise UserError(
                f"out={self.path}: it was measured elsewhere ({differences}); give another name"
            )
        self.rows = rows
        self.attempts = content.get("attempts", {})
        self.setting = setting
        self.goal_values = content.get("lines", {})

    def has_row(self, name: str, source: str | None) -> bool:
        """Tell whether a row was measured from the same source."""
        row = self.rows.get(name, {"failed": "not measured"})
        return "failed" not in row and row.get("source") == source

    def count_failures(self, name: str) -> int:
        """Return how often a row went wrong before: the processes that it ended, or 1 for a
        failure.
        """
        return self.attempts.get(name, 0) or int("failed" in self.rows.get(name, {}))

    def count_crashes(self, system: str) -> int:
        """Return how often a system was running, in whatever row, when a process ended."""
        return sum(count for name, count in self.attempts.items() if name.endswith(f"/{system}"))

    def begin_attempt(self, name: str) -> int:
        """Record that risky work begins, before it can end the process; return how often it had
        begun without ending.
        """
        before = self.attempts.get(name, 0)
        self.attempts[name] = before + 1
        self.save()
        return before

    def end_attempt(self, name: str) -> None:
        """Record that the work returned, done or failed."""
        self.attempts.pop(name, None)
        self.save()

    def save(self) -> None:
        """Replace the file atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"setting": self.setting, "rows": self.rows, "attempts": self.attempts}
        content |= {"lines": self.goal_values} if self.goal_values else {}
        write_text(self.path, json.dumps(content, indent=1, allow_nan=False) + "\n")


class TimedWork:
    """Work that is ready to be timed: on a GPU a graph of several launches, elsewhere or without
    a graph plain calls.
    """

    def __init__(self, work: Work, device: torch.device, launches: int, graph: bool = True) -> None:
        self.device = device
        self.launches = 1
        self.replay: Callable[[], Any] = lambda: [work(i) for i in range(self.launches)]
        self.measure_seconds()  # compiles, and allocates workspaces
        self.launches = max(1, min(launches, int(MAX_REPLAY_SECONDS / self.measure_seconds())))
        if device.type == "cuda" and graph:
            self.replay = self._capture_graph(work)
        self.measure_seconds()

    def _capture_graph(self, work: Work) -> Callable[[], Any]:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for i in range(3):
                work(i)
        torch.cuda.current_stream(self.device).wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with capture_graph(captured):
            for i in range(self.launches):
                work(i)
        return captured.replay

    def measure_seconds(self) -> float:
        """Return the seconds of one launch, as the mean over one replay."""
        if self.device.type != "cuda":
            began = time.perf_counter()
            self.replay()
            return (time.perf_counter() - began) / self.launches
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3 / self.launches


def time_interleaved(replays: dict[str, TimedWork], repeats: int) -> dict[str, list[float]]:
    """Return `repeats` samples of each work's seconds a launch, in an order drawn anew for every
    repeat.
    """
    return sample_shuffled(
        {name: replay.measure_seconds for name, replay in replays.items()}, repeats
    )


def sample_shuffled(
    works: dict[str, Callable[[], SampleT]], repeats: int
) -> dict[str, list[SampleT]]:
    """Return what each function returned in `repeats` calls, in an order drawn anew for every
    repeat.
    """
    order = list(works)
    generator = random.Random(0)
    samples: dict[str, list[SampleT]] = {name: [] for name in works}
    for _ in range(repeats):
        generator.shuffle(order)
        for name in order:
            samples[name].append(works[name]())
    return samples


def summarize_times(seconds: list[float]) -> dict[str, float]:
    """Return the median and the 10th and 90th percentiles in microseconds."""
    deciles = quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else seconds * 9
    return {"median": median(seconds) * 1e6, "p10": deciles[0] * 1e6, "p90": deciles[8] * 1e6}


def paired_ratio(candidate: list[float], baseline: list[float]) -> float:
    """Return the median over repeats of the baseline's time over the candidate's."""
    return median(b / a for a, b in zip(candidate, baseline))


def check_alive(device: torch.device) -> None:
    """Raise where an error has left the GPU's context unusable, since later work would fail for
    no fault of its own.
    """
    synchronize_device(device)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return |actual - expected| / |expected| over all entries, or infinity where an entry is
    not a number.
    """
    error = float(
        (actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300)
    )
    return error if error == error else float("inf")
