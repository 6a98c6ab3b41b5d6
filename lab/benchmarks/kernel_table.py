"""Write the table of tree attention's configurations into docs/results/speed.md: what the
compiler makes of them for sm_90.

    python -m lab.benchmarks.kernel_table

It needs triton and no GPU, and takes a minute or two; nothing is run.
"""

import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lab.pages.render import format_table
from spectrain.kernels import tree_attention
from tests.kernels import aot
from tests.kernels.test_compiled import ROWS, attention

PAGE = Path(__file__).parents[2] / "docs" / "results" / "speed.md"
MARKS = "<!-- registers -->", "<!-- /registers -->"
# bf16 operations a cycle of a multiprocessor, at the rate that a large product reaches
DENSE = 790e12 / 132 / 1.755e9


@dataclass(frozen=True)
class BuiltKernel:
    """One configuration as it was compiled."""

    tiles: str
    rows: int
    keys: int  # that a turn of the loop over the prefix takes
    warps: int
    usage: aot.Usage

    @property
    def instructions(self) -> float:
        """The instructions of a warp for 64 keys of the prefix."""
        return self.usage.loops[0] * 64 / self.keys

    def share(self, head_size: int) -> float:
        """Of a turn, the part that is products, if everything else came before and after them:
        four warps issue at a time.
        """
        products = 4 * self.rows * 64 * head_size / DENSE
        return products / (products + self.instructions * self.warps / 4)

    def cells(self, head_size: int) -> list[str]:
        used = self.usage
        share = f"{self.share(head_size):.2f}" if self.usage.wgmma else ""
        return [
            self.tiles,
            f"{used.registers} / {used.stack}",
            f"{used.shared / 1024:.0f}",
            f"{self.instructions:.0f}",
            share,
        ]


def build_kernel(head_size: int, num_rows: int, **options: bool) -> BuiltKernel:
    """Compile the configuration that a launch would choose."""
    tiles = tree_attention.choose_tiles(num_rows, head_size, torch.bfloat16)
    request = attention(torch.bfloat16, head_size, num_rows, **options)
    constants = request.constants | {
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_P": tiles.block_p,
    }
    request = replace(request, constants=constants, warps=tiles.num_warps, stages=tiles.num_stages)
    cut = f"{tiles.block_m} x {tiles.block_p}, {tiles.num_warps} w, {tiles.num_stages} s"
    return BuiltKernel(cut, tiles.block_m, tiles.block_p, tiles.num_warps, aot.compile_for(request))


def make_table() -> str:
    """Return the table, a row for every configuration, with windows and softcaps and
    without.
    """
    titles = [
        "head size, rows",
        "rows x keys, warps, stages",
        "registers / stack",
        "shared KB",
        "instructions",
        "products",
    ]
    rows = []
    for options in ({}, {"window": True, "softcap": True}):
        for head_size in tree_attention.TILE_CONFIGS:
            for num_rows in sorted(ROWS):
                cells = build_kernel(head_size, num_rows, **options).cells(head_size)
                name = f"{head_size}, {num_rows}" + (", window and softcap" if options else "")
                rows.append([name, *cells])
    return format_table(titles, rows)


def describe_compilers() -> str:
    """Return the versions of Triton and of the assembler that it ships."""
    import triton

    tool = Path(aot.tool()).with_name("ptxas")
    stdout: Any = subprocess.run(
        [str(tool), "--version"], check=True, capture_output=True, text=True
    ).stdout
    release = (
        next(line for line in stdout.splitlines() if "release" in line)
        .rsplit("release", 1)[1]
        .strip()
    )
    return f"Triton {triton.__version__}, ptxas {release}"


def main() -> None:
    setting = f"sm_90, bfloat16, four query heads to a key-value head; {describe_compilers()}."
    begin, rest = PAGE.read_text().split(MARKS[0])
    end = rest.split(MARKS[1])[1]
    PAGE.write_text(f"{begin}{MARKS[0]}\n{setting}\n\n{make_table()}\n{MARKS[1]}{end}")


if __name__ == "__main__":
    main()
