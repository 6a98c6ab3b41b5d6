"""Write the table of tree attention's configurations into docs/results/kernels.md: what the
compiler makes of them for sm_90.

python -m benchmarks.kernel_table              needs triton and git and no GPU, and takes two
minutes; nothing is run

Before is the file at the revision below, after is the file as it stands, compiled by the same
compiler with the same arguments.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from spectrain.kernels import tree_attention
from tests.kernels import aot
from tests.kernels.test_compiled import ROWS, attention

BEFORE = "4f886a9"  # the last revision whose loop masked every block of keys
PAGE = Path(__file__).parents[1] / "docs" / "results" / "kernels.md"
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


def load_revision(revision: str, folder: Path) -> ModuleType:
    """Load the kernel's file of a revision, importable here and in the process that compiles."""
    source = subprocess.run(
        ["git", "show", f"{revision}:kernels/tree_attention.py"],
        check=True,
        capture_output=True,
        text=True,
        cwd=PAGE.parent,
    ).stdout
    path = folder / "tree_attention_before.py"
    path.write_text(source.replace("from .dispatch", "from spectrain.kernels.dispatch"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_kernel(
    module: ModuleType, head_size: int, num_rows: int, **options: bool
) -> BuiltKernel | None:
    """Compile the configuration that a launch would choose; return None where the module has
    none for such heads.
    """
    if head_size > max(module.CONFIGS):
        return None
    tiles = module.choose_tiles(num_rows, head_size, torch.bfloat16)
    request = attention(torch.bfloat16, head_size, num_rows, **options)
    keys = getattr(tiles, "block_p", tiles.block_n)
    constants = request.constants | {
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_P": keys,
    }
    argument_names = module._split_kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in argument_names}
    request = replace(
        request, module=module.__name__, constants=constants, warps=tiles.warps, stages=tiles.stages
    )
    cut = f"{tiles.block_m} x {keys}, {tiles.warps} w, {tiles.stages} s"
    return BuiltKernel(cut, tiles.block_m, keys, tiles.warps, aot.compile_for(request))


def make_table(before: ModuleType, after: ModuleType) -> list[str]:
    """Return the lines of the table, one for every configuration, with windows and softcaps and
    without.
    """
    half = [
        "rows x keys, warps, stages",
        "registers / stack",
        "shared KB",
        "instructions",
        "products",
    ]
    lines = [
        "| head size, rows | "
        + " | ".join([f"before: {half[0]}", *half[1:], f"after: {half[0]}", *half[1:]])
        + " |"
    ]
    lines.append("|---|" + "---|" * 10)
    for options in ({}, {"window": True, "softcap": True}):
        for head_size in tree_attention.TILE_CONFIGS:
            for num_rows in sorted(ROWS):
                builds = [
                    build_kernel(module, head_size, num_rows, **options)
                    for module in (before, after)
                ]
                cells = [[""] * 5 if build is None else build.cells(head_size) for build in builds]
                name = f"{head_size}, {num_rows}" + (", window and softcap" if options else "")
                lines.append(f"| {name} | " + " | ".join(cells[0] + cells[1]) + " |")
    return lines


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
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [folder, str(PAGE.parents[1]), os.environ.get("PYTHONPATH", "")]
        )
        lines = make_table(load_revision(BEFORE, Path(folder)), tree_attention)
    text = PAGE.read_text()
    begin, rest = text.split(MARKS[0])
    end = rest.split(MARKS[1])[1]
    body = "\n".join(
        [
            f"sm_90, bfloat16, four query heads to a key-value head; {describe_compilers()}.",
            "",
            *lines,
        ]
    )
    PAGE.write_text(f"{begin}{MARKS[0]}\n{body}\n{MARKS[1]}{end}")


if __name__ == "__main__":
    main()
