"""The base of a benchmark: rows that are measured in turn, each written at once, the machine's
ceilings first.
"""

import hashlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, Protocol

import torch
from rich.console import Console

from spectrain.errors import UserError, describe_error

from .attention import H200_CEILINGS
from .measure import ResultFile, TimedWork, check_alive, describe_setting

MAX_ATTEMPTS = 2
"""Attempts at a row that ends the process."""


@dataclass(frozen=True)
class Measurement:
    """A row to measure; `source` is a hash of the code whose change voids an old result."""

    name: str
    source: str | None
    measure: Callable[[], dict[str, Any]]

    @property
    def row_group(self) -> str:
        """The first two parts of the name: for a correctness case, its kernel."""
        return "/".join(self.name.split("/")[:2])


def source_digest(*modules: ModuleType) -> str:
    """Return a hash of these modules' files."""
    digest = hashlib.sha256()
    for module in modules:
        assert module.__file__ is not None
        digest.update(Path(module.__file__).read_bytes())
    return digest.hexdigest()[:12]


class CeilingSizes(Protocol):
    """The sizes with which the machine's limits are measured."""

    copied_bytes: int
    product_width: int
    repeats: int


class Bench(ABC):
    """Measure `part` and write each row into `out` as soon as it is measured; begin nothing
    after `seconds`.
    """

    part: Any
    out: str
    toy: bool
    seconds: float
    row_seconds = 120

    @property
    @abstractmethod
    def sizes(self) -> Any:
        """The shapes to measure and the numbers of samples, with the fields of `CeilingSizes`."""

    @abstractmethod
    def plan_measurements(self) -> Iterator[Measurement]:
        """Yield every row of the part, the ceilings first."""

    def goal_values(self) -> dict[str, float]:
        """Return what the rows show about goals that the report cannot compute."""
        return {}

    def run(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        if self.device.type != "cuda" and not self.toy:
            raise UserError("toy=false: there is no GPU; toy=true runs every line at a small size")
        self.results = ResultFile(
            Path(self.out), describe_setting(self.device, self.dtype, self.toy)
        )
        console = Console(soft_wrap=True)
        began = time.monotonic()
        left = self.pending_measurements()
        while left and time.monotonic() - began < self.seconds:
            step = left.pop(0)
            console.print(f"{step.name}: {self.measure_row(step)}", highlight=False, markup=False)
        failed = sum("failed" in row for row in self.results.rows.values())
        count = f"{len(self.results.rows)} rows are in {self.out}, {failed} of them failed"
        console.print(
            f"{count}; {len(left)} are left, so run it again" if left else f"{count}; none is left"
        )

    def pending_measurements(self) -> list[Measurement]:
        """Return the rows to measure, untried ones first; last are those that share code or kernel
        with a row that ended a process."""
        steps = list(self.plan_measurements())
        ended = [step for step in steps if self.results.attempts.get(step.name)]
        sources = {step.source for step in ended}
        kinds = {step.row_group for step in ended}
        pending = [step for step in steps if not self.results.has_row(step.name, step.source)]
        return sorted(
            pending,
            key=lambda step: (
                self.results.count_failures(step.name),
                (step.source in sources) + (step.row_group in kinds),
            ),
        )

    def measure_row(self, step: Measurement) -> str:
        """Measure one row, write it even if it failed, and return a summary.

        An error may leave the GPU's context unusable, and a row may never return. So its beginning
        is recorded before it, its failure before the device is used again, and the next process
        begins with the untried rows.
        """
        if self.results.begin_attempt(step.name) >= MAX_ATTEMPTS:
            before = self.results.rows.get(step.name, {}).get("failed")
            previous = f" ({before})" if before else ""
            row: dict[str, Any] = {
                "failed": f"the process ended {MAX_ATTEMPTS} times while this ran{previous}"
            }
        else:
            row = self._measure_watched(step)
        self._store_row(step, row)
        if "failed" in row:
            check_alive(self.device)  # where this raises, the process ends
        self.results.end_attempt(step.name)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return summarize_row(row)

    def _measure_watched(self, step: Measurement) -> dict[str, Any]:
        """Return a row, or why there is none; a row that takes longer than `row_seconds` is written
        as failed and ends the process."""

        def abort_process() -> None:
            self._store_row(step, {"failed": f"it took longer than {self.row_seconds} seconds"})
            os._exit(1)

        watchdog = threading.Timer(self.row_seconds, abort_process)
        watchdog.daemon = True
        watchdog.start()
        try:
            return step.measure()
        except Exception as error:
            return {"failed": describe_error(error)}
        finally:
            watchdog.cancel()

    def _store_row(self, step: Measurement, row: dict[str, Any]) -> None:
        self.results.rows[step.name] = {"source": step.source, **row}
        self.results.goal_values = self.goal_values()
        self.results.save()

    def plan_ceilings(self) -> Iterator[Measurement]:
        yield Measurement("ceilings/copy", None, self.measure_copy)
        yield Measurement("ceilings/product", None, self.measure_product)

    def machine_rates(self) -> dict[str, float]:
        """Return the ceilings; where one could not be measured, an H200's."""
        rows = self.results.rows
        ceilings = {
            "bytes_per_second": rows.get("ceilings/copy", {}),
            "flops_per_second": rows.get("ceilings/product", {}),
        }
        return {name: row.get(name, H200_CEILINGS[name]) for name, row in ceilings.items()}

    def measure_copy(self) -> dict[str, Any]:
        """Return the bytes a second, read and written, of a large copy."""
        source = torch.ones(self.sizes.copied_bytes // 4, device=self.device)
        target = torch.empty_like(source)
        seconds = self.time_work(lambda i: target.copy_(source))
        return {"bytes_per_second": 2 * source.nbytes / median(seconds), "bytes": 2 * source.nbytes}

    def measure_product(self) -> dict[str, Any]:
        """Return the operations a second of a large product of random matrices; zeros would be a
        seventh faster (H200).
        """
        width = self.sizes.product_width
        left, right = (
            torch.randn(width, width, device=self.device).to(self.dtype) for _ in range(2)
        )
        out = torch.empty_like(left)
        seconds = self.time_work(lambda i: torch.mm(left, right, out=out))
        return {"flops_per_second": 2 * width**3 / median(seconds), "width": width}

    def time_work(self, work: Callable[[int], Any]) -> list[float]:
        replay = TimedWork(work, self.device, launches=4)
        return [replay.measure_seconds() for _ in range(self.sizes.repeats)]


def summarize_row(row: dict[str, Any]) -> str:
    """Return what the console shows of a row."""
    if "failed" in row:
        return f"failed, {row['failed']}"
    if "fastest" in row:
        chosen, fastest = (
            f"{row[name]} {row['us'][row[name]]['median']:.1f} us" for name in ("chosen", "fastest")
        )
        return (
            f"chosen {chosen}, fastest {fastest}, of {len(row['us'])}; not run: "
            f"{len(row['not_run'])}"
        )
    if "us" in row:
        times = ", ".join(f"{name} {spread['median']:.1f}" for name, spread in row["us"].items())
        without = f"; not run: {', '.join(row['not_run'])}" if row["not_run"] else ""
        return f"{times} us{without}"
    if "within" in row:
        error = "NaN" if row["relative_error"] is None else f"{row['relative_error']:.1e}"
        return (
            f"{'ok' if row['within'] else 'WRONG'}, {error}, by the "
            f"{'kernel' if row['by_kernel'] else 'reference'}"
        )
    return ", ".join(
        f"{name} {value:.3g}" for name, value in row.items() if isinstance(value, int | float)
    )
