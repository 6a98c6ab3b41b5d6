"""`spectrain bench kernels`: what the machine can do, whether the kernels are right, and how near they come.

Parts: ceilings (copy bandwidth and a large matrix product, which every part wants first), correctness, table (tree attention
and what else computes it, at the shape of Llama-3.1-8B), tuning (the same by other tiles) and divergence (the fused loss).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

import torch

from spectrain.kernels import linear_divergence, tree_attention

from .attention import Cell, Geometry, table_row
from .correctness import judge, named
from .divergence import Loss, divergence_row
from .steps import Bench, Step, digest
from .tuning import tuning_row

Part = Literal["all", "ceilings", "correctness", "table", "tuning", "divergence"]


@dataclass(frozen=True)
class KernelSizes:
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
    other_heads: tuple[tuple[int, int, int], ...] = ((28, 4, 128), (64, 8, 64), (16, 2, 256))  # Qwen2-7B, gpt-oss, Qwen3-Next

    def cells(self) -> list[Cell]:
        """The rows of the table, the largest trees first, and behind them the largest one of a single row by other heads."""
        most, *fewer = [[Cell(*shape) for shape in product(self.batches, self.prefixes, (nodes,))] for nodes in self.nodes]
        middle = self.prefixes[len(self.prefixes) // 2]
        others = [Cell(self.batches[0], middle, self.nodes[0], heads) for heads in self.other_heads]
        return [*most, *others, *(cell for cells in fewer for cell in cells)]

    def tuned(self) -> list[Cell]:
        """Cells by which tiles are chosen: the largest trees that have goals, a small one, and a single node."""
        middle, longest = self.prefixes[len(self.prefixes) // 2], self.prefixes[-1]
        shapes = [(middle, self.nodes[0]), (longest, self.nodes[0]), (middle, self.nodes[len(self.nodes) // 2]), (middle, 1)]
        return [Cell(self.batches[0], *shape) for shape in dict.fromkeys(shapes)]

    def geometry(self, cell: Cell, dtype: torch.dtype, device: torch.device) -> Geometry:
        return Geometry(*(cell.heads or self.heads), dtype, device)

    def losses(self) -> list[Loss]:
        return [Loss(rows, self.loss_width, vocab) for rows, vocab in product(self.loss_rows, self.vocabularies)]


TOY = KernelSizes(1 << 16, 32, (4, 2, 16), (1, 2), (33,), (9, 1), (6,), 16, (40,), 2, 3, 3, ((3, 1, 8),))
"""Every line of it in seconds, on any machine; the numbers mean nothing."""


@dataclass
class KernelBench(Bench):
    """Measure `part` and write each row into `out` as it comes; nothing new is begun after `seconds`."""

    part: Part = "all"
    out: str = "eval/results/kernels.json"
    toy: bool = False
    seconds: float = 420  # the slowest row may take a minute more

    @property
    def sizes(self) -> KernelSizes:
        return TOY if self.toy else KernelSizes()

    def steps(self) -> Iterator[Step]:
        """Everything that the part asks for, what is worth most first: the ceilings, a case of every kernel, the table's first
        sizes, which have goals; the rest."""
        parts = {
            "correctness": self.correctness,
            "table": self.table,
            "tuning": self.tuning,
            "divergence": self.divergence,
        }
        asked = {name: list(steps()) for name, steps in parts.items() if self.part in ("all", name)}
        cases, table = asked.get("correctness", []), asked.get("table", [])
        first = [*self.first_cases(cases), *table[: len(self.sizes.batches) * len(self.sizes.prefixes)]]
        yield from self.ceilings()
        yield from first
        known = {step.name for step in first}
        yield from (
            step
            for name in ("tuning", "table", "divergence", "correctness")
            for step in asked.get(name, ())
            if step.name not in known
        )

    def first_cases(self, cases: list[Step]) -> list[Step]:
        """Of every kernel the first case in the type that is served."""
        dtype = str(self.dtype).removeprefix("torch.")
        found: dict[str, Step] = {}
        for step in cases:
            _, kernel, of, _ = step.name.split("/", 3)
            if of == dtype:
                found.setdefault(kernel, step)
        return list(found.values())

    def correctness(self) -> Iterator[Step]:
        for name, check, case, dtype in named(self.toy):
            yield Step(name, digest(*check.modules), partial(judge, check, case, dtype, self.device))

    def table(self) -> Iterator[Step]:
        for cell in self.sizes.cells():
            yield Step(cell.name, digest(tree_attention), partial(self.cell_row, table_row, cell))

    def cell_row(self, measured: Callable[..., dict[str, Any]], cell: Cell) -> dict[str, Any]:
        """A row of the table, or of the tuning, at this cell."""
        geometry = self.sizes.geometry(cell, self.dtype, self.device)
        return measured(cell, geometry, self.results, self.rates(), self.sizes.launches, self.sizes.repeats)

    def tuning(self) -> Iterator[Step]:
        for cell in self.sizes.tuned():
            yield Step(f"tuning/{cell.name}", digest(tree_attention), partial(self.cell_row, tuning_row, cell))

    def divergence(self) -> Iterator[Step]:
        rest = self.dtype, self.device, self.sizes.loss_repeats
        for loss in self.sizes.losses():
            yield Step(loss.name, digest(linear_divergence), partial(divergence_row, loss, *rest))
