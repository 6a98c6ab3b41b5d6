"""`python -m lab.benchmarks.kernels`: the machine's limits, the kernels' correctness, and how close
they come to the limits.

Parts: ceilings (copy bandwidth and a large matrix product, which every part measures first),
correctness, table (tree attention and its alternatives at the shape of Llama-3.1-8B), tuning (tree
attention with other tiles) and divergence (the fused loss).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

import torch

from spectrain.kernels import linear_divergence, tree_attention

from .attention import AttentionCell, Geometry, table_row
from .command import run_benchmark
from .correctness import check_case, iterate_cases
from .divergence import LossShape, divergence_row
from .steps import Bench, Measurement, source_digest
from .tuning import tuning_row

KernelPart = Literal["all", "ceilings", "correctness", "table", "tuning", "divergence"]


@dataclass(frozen=True)
class KernelSizes:
    """The shapes to measure, and the numbers of samples."""

    copied_bytes: int = 2 << 30
    product_width: int = 8192
    # query heads, key-value heads, head size: Llama-3.1-8B
    heads: tuple[int, int, int] = (32, 8, 128)
    batches: tuple[int, ...] = (1, 8)
    prefixes: tuple[int, ...] = (1024, 8192, 32768)
    nodes: tuple[int, ...] = (64, 32, 16, 8, 1)
    loss_rows: tuple[int, ...] = (2048, 8192)
    loss_width: int = 4096
    vocabularies: tuple[int, ...] = (32000, 128256)
    launches: int = 32
    repeats: int = 50
    loss_repeats: int = 20
    # Qwen2-7B, gpt-oss, Qwen3-Next
    other_heads: tuple[tuple[int, int, int], ...] = ((28, 4, 128), (64, 8, 64), (16, 2, 256))

    def table_cells(self) -> list[AttentionCell]:
        """Return the rows of the table: the largest trees first, then the largest tree of one
        sequence with other heads.
        """
        most, *fewer = [
            [AttentionCell(*shape) for shape in product(self.batches, self.prefixes, (nodes,))]
            for nodes in self.nodes
        ]
        middle = self.prefixes[len(self.prefixes) // 2]
        others = [
            AttentionCell(self.batches[0], middle, self.nodes[0], heads)
            for heads in self.other_heads
        ]
        return [*most, *others, *(cell for cells in fewer for cell in cells)]

    def tuned_cells(self) -> list[AttentionCell]:
        """Return the cells by which tiles are chosen: the largest trees that have goals, a small
        tree, and a single node.
        """
        middle = self.prefixes[len(self.prefixes) // 2]
        longest = self.prefixes[-1]
        shapes = [
            (middle, self.nodes[0]),
            (longest, self.nodes[0]),
            (middle, self.nodes[len(self.nodes) // 2]),
            (middle, 1),
        ]
        return [AttentionCell(self.batches[0], *shape) for shape in dict.fromkeys(shapes)]

    def cell_geometry(
        self, cell: AttentionCell, dtype: torch.dtype, device: torch.device
    ) -> Geometry:
        return Geometry(*(cell.heads or self.heads), dtype, device)

    def loss_shapes(self) -> list[LossShape]:
        return [
            LossShape(rows, self.loss_width, vocab)
            for rows, vocab in product(self.loss_rows, self.vocabularies)
        ]


TOY = KernelSizes(
    1 << 16, 32, (4, 2, 16), (1, 2), (33,), (9, 1), (6,), 16, (40,), 2, 3, 3, ((3, 1, 8),)
)
"""Sizes that run every line in seconds on any machine; the numbers mean nothing."""


@dataclass
class KernelBench(Bench):
    """Measure `part` and write each row into `out` as soon as it is measured."""

    # Part to measure: all, ceilings, correctness, table, tuning or divergence.
    part: KernelPart = "all"
    # JSON file of the results; rows that it holds are not measured again unless their code changed.
    out: str = "lab/results/kernels.json"
    # Whether to run every line at a small size, on any machine; the numbers then mean nothing.
    toy: bool = False
    # Seconds after which no new row is begun; the slowest row may take a minute more.
    seconds: float = 420

    @property
    def sizes(self) -> KernelSizes:
        return TOY if self.toy else KernelSizes()

    def plan_measurements(self) -> Iterator[Measurement]:
        """Yield the part's rows by their worth: ceilings, a case of every kernel, the sizes that
        have goals, then the rest.
        """
        parts = {
            "correctness": self.plan_correctness,
            "table": self.plan_table,
            "tuning": self.plan_tuning,
            "divergence": self.plan_divergence,
        }
        measurements = {
            name: list(plan()) for name, plan in parts.items() if self.part in ("all", name)
        }
        cases = measurements.get("correctness", [])
        table = measurements.get("table", [])
        first = [
            *self.first_cases(cases),
            *table[: len(self.sizes.batches) * len(self.sizes.prefixes)],
        ]
        yield from self.plan_ceilings()
        yield from first
        planned = {step.name for step in first}
        yield from (
            step
            for name in ("tuning", "table", "divergence", "correctness")
            for step in measurements.get(name, ())
            if step.name not in planned
        )

    def first_cases(self, cases: list[Measurement]) -> list[Measurement]:
        """Return the first case of every kernel in the dtype that engines serve."""
        dtype = str(self.dtype).removeprefix("torch.")
        cases_by_kernel: dict[str, Measurement] = {}
        for step in cases:
            _, kernel, case_dtype, _ = step.name.split("/", 3)
            if case_dtype == dtype:
                cases_by_kernel.setdefault(kernel, step)
        return list(cases_by_kernel.values())

    def plan_correctness(self) -> Iterator[Measurement]:
        for name, check, case, dtype in iterate_cases(self.toy):
            yield Measurement(
                name,
                source_digest(*check.modules),
                partial(check_case, check, case, dtype, self.device),
            )

    def plan_table(self) -> Iterator[Measurement]:
        for cell in self.sizes.table_cells():
            yield Measurement(
                cell.name, source_digest(tree_attention), partial(self.cell_row, table_row, cell)
            )

    def cell_row(
        self, measure: Callable[..., dict[str, Any]], cell: AttentionCell
    ) -> dict[str, Any]:
        """Measure a row of the table or of the tuning at a cell."""
        geometry = self.sizes.cell_geometry(cell, self.dtype, self.device)
        return measure(
            cell,
            geometry,
            self.results,
            self.machine_rates(),
            self.sizes.launches,
            self.sizes.repeats,
        )

    def plan_tuning(self) -> Iterator[Measurement]:
        for cell in self.sizes.tuned_cells():
            yield Measurement(
                f"tuning/{cell.name}",
                source_digest(tree_attention),
                partial(self.cell_row, tuning_row, cell),
            )

    def plan_divergence(self) -> Iterator[Measurement]:
        rest = self.dtype, self.device, self.sizes.loss_repeats
        for loss in self.sizes.loss_shapes():
            yield Measurement(
                loss.name, source_digest(linear_divergence), partial(divergence_row, loss, *rest)
            )


if __name__ == "__main__":
    run_benchmark(KernelBench)
