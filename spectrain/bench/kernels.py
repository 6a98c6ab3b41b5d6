"""`spectrain bench kernels`: what the machine can do, whether the kernels are right, and how near they come.

Parts: ceilings (copy bandwidth and a large matrix product, which every part wants first), correctness, table (tree attention
and what else computes it, at the shape of Llama-3.1-8B) and divergence (the fused loss).
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, Literal

import torch
from rich.console import Console

from spectrain.kernels import linear_divergence, tree_attention

from ..errors import UserError
from .attention import CONSTANTS, Cell, Geometry, table_row
from .correctness import judge, named
from .divergence import Loss, divergence_row
from .measure import Replay, Results, check_alive, reason, setting

Part = Literal["all", "ceilings", "correctness", "table", "divergence"]


@dataclass(frozen=True)
class Sizes:
    """What is measured, and how often."""

    copied_bytes: int = 2 << 30
    product_width: int = 8192
    heads: tuple[int, int, int] = (32, 8, 128)  # query heads, key-value heads, head size: Llama-3.1-8B
    batches: tuple[int, ...] = (1, 8)
    prefixes: tuple[int, ...] = (1024, 8192, 32768)
    nodes: tuple[int, ...] = (64, 32, 16, 8, 1)
    loss_rows: tuple[int, ...] = (2048, 8192)
    loss_width: int = 4096
    vocabularies: tuple[int, ...] = (32000, 128256)
    launches: int = 32
    repeats: int = 50
    loss_repeats: int = 20

    def cells(self) -> list[Cell]:
        """The rows of the table, those with a goal first."""
        return [Cell(*shape) for nodes in self.nodes for shape in product(self.batches, self.prefixes, (nodes,))]

    def losses(self) -> list[Loss]:
        return [Loss(rows, self.loss_width, vocab) for rows, vocab in product(self.loss_rows, self.vocabularies)]


TOY = Sizes(1 << 16, 32, (4, 2, 16), (1, 2), (33,), (9, 1), (6,), 16, (40,), 2, 3, 3)
"""Every line of it in seconds, on any machine; the numbers mean nothing."""


@dataclass(frozen=True)
class Step:
    """One row to measure; `source` is a hash of the code whose change makes an old measurement void."""

    name: str
    source: str | None
    measure: Callable[[], dict[str, Any]]


def digest(module: ModuleType) -> str:
    assert module.__file__ is not None
    return hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()[:12]


@dataclass
class KernelBench:
    """Measure `part` and write each row into `out` as it comes; nothing new is begun after `seconds`."""

    part: Part = "all"
    out: str = "eval/results/kernels.json"
    toy: bool = False
    seconds: float = 420  # the slowest row may take a minute more

    def run(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        if self.device.type != "cuda" and not self.toy:
            raise UserError("bench.toy=false: there is no GPU here; bench.toy=true runs every line at small size")
        self.sizes = TOY if self.toy else Sizes()
        self.results = Results(Path(self.out), setting(self.device, self.dtype, self.toy))
        console, began = Console(soft_wrap=True), time.monotonic()
        left = [step for step in self.steps() if not self.results.has(step.name, step.source)]
        while left and time.monotonic() - began < self.seconds:
            step = left.pop(0)
            console.print(f"{step.name}: {self.measured(step)}", highlight=False, markup=False)
        failed = sum("failed" in row for row in self.results.rows.values())
        count = f"{len(self.results.rows)} rows are in {self.out}, {failed} of them failed"
        console.print(f"{count}; {len(left)} are left: run it again" if left else f"{count}; none is left")

    def measured(self, step: Step) -> str:
        """Measure one row, failed or not, and write it; a line about it."""
        try:
            row = step.measure()
        except Exception as error:
            check_alive(self.device)
            row = {"failed": reason(error)}
        self.results.add(step.name, {"source": step.source, **row})
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return summary(row)

    def steps(self) -> Iterator[Step]:
        """Everything that the part asks for, the ceilings first."""
        parts = {"correctness": self.correctness, "table": self.table, "divergence": self.divergence}
        yield from self.ceilings()
        for name, steps in parts.items():
            if self.part in ("all", name):
                yield from steps()

    def ceilings(self) -> Iterator[Step]:
        yield Step("ceilings/copy", None, self.copy_rate)
        yield Step("ceilings/product", None, self.product_rate)

    def copy_rate(self) -> dict[str, Any]:
        """Bytes a second, read and written, of a large copy."""
        source = torch.ones(self.sizes.copied_bytes // 4, device=self.device)
        target = torch.empty_like(source)
        seconds = self.times(lambda i: target.copy_(source))
        return {"bytes_per_second": 2 * source.nbytes / median(seconds), "bytes": 2 * source.nbytes}

    def product_rate(self) -> dict[str, Any]:
        """Operations a second of a large product of random matrices: of zeros it would be a seventh faster (H200)."""
        width = self.sizes.product_width
        left, right = (torch.randn(width, width, device=self.device).to(self.dtype) for _ in range(2))
        out = torch.empty_like(left)
        seconds = self.times(lambda i: torch.mm(left, right, out=out))
        return {"flops_per_second": 2 * width**3 / median(seconds), "width": width}

    def times(self, work: Callable[[int], Any]) -> list[float]:
        replay = Replay(work, self.device, launches=4)
        return [replay.seconds() for _ in range(self.sizes.repeats)]

    def correctness(self) -> Iterator[Step]:
        for name, check, case, dtype in named(self.toy):
            yield Step(name, digest(check.module), partial(judge, check, case, dtype, self.device))

    def table(self) -> Iterator[Step]:
        geometry = Geometry(*self.sizes.heads, self.dtype, self.device)
        for cell in self.sizes.cells():
            yield Step(cell.name, digest(tree_attention), partial(self.table_row, cell, geometry))

    def table_row(self, cell: Cell, geometry: Geometry) -> dict[str, Any]:
        rows = self.results.rows
        rates = {"bytes_per_second": rows["ceilings/copy"], "flops_per_second": rows["ceilings/product"]}
        ceilings = {name: row.get(name, CONSTANTS[name]) for name, row in rates.items()}
        return table_row(cell, geometry, self.results, ceilings, self.sizes.launches, self.sizes.repeats)

    def divergence(self) -> Iterator[Step]:
        rest = self.dtype, self.device, self.sizes.loss_repeats
        for loss in self.sizes.losses():
            yield Step(loss.name, digest(linear_divergence), partial(divergence_row, loss, *rest))


def summary(row: dict[str, Any]) -> str:
    """What the console shows of a row."""
    if "failed" in row:
        return f"failed, {row['failed']}"
    if "us" in row:
        times = ", ".join(f"{name} {spread['median']:.1f}" for name, spread in row["us"].items())
        without = f"; not run: {', '.join(row['not_run'])}" if row["not_run"] else ""
        return f"{times} us{without}"
    if "within" in row:
        error = "NaN" if row["relative_error"] is None else f"{row['relative_error']:.1e}"
        return f"{'ok' if row['within'] else 'WRONG'}, {error}, by the {'kernel' if row['by_kernel'] else 'reference'}"
    return ", ".join(f"{name} {value:.3g}" for name, value in row.items() if isinstance(value, float))
