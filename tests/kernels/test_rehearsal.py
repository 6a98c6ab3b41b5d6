"""What the first GPU will be asked to launch is launched here: every kernel, by Triton's own
path, compiled for sm_90 and sm_100. The resources of every variant are in a committed table;
SPECTRAIN_COUNT=1 pytest tests/kernels/test_rehearsal.py -m "" writes it anew.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import spectrain.kernels

triton = pytest.importorskip("triton", reason="triton is not installed, so nothing can be launched")
TABLE = Path(__file__).parent / "resources.json"
FOLDER = Path(spectrain.kernels.__path__[0])
# Of the variants that a training or a round launches, those in float32 that spill a few words: the
# assembler keeps below 80 or 128 registers there, for more warps at once.
SPILLS = {"_split_kernel fp32": 64}


def list_kernels() -> set[str]:
    """List the kernels that are launched: compiled functions whose names say that they are
    one."""
    names = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            # Functions of kernels that others call end in _in_kernel.
            is_kernel = isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
            if is_kernel and not node.name.endswith("_in_kernel"):
                decorators = [d.id for d in node.decorator_list if isinstance(d, ast.Name)]
                names |= {node.name} if "jit" in decorators else set()
    return names


def allowed_stack(variant: str) -> int:
    return next((size for name, size in SPILLS.items() if variant.startswith(name)), 0)


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_the_table_has_every_kernel_and_nothing_spills(architecture: str) -> None:
    """Every kernel of the folder has its registers, shared memory and occupancy in the table, and
    none but exact float32 attention uses the stack."""
    variants: dict[str, Any] = json.loads(TABLE.read_text())[architecture]
    assert {variant.split(" ")[0] for variant in variants} == list_kernels()
    for variant, usage in variants.items():
        assert usage["stack"] <= allowed_stack(variant), variant
        assert 0 < usage["registers"] <= 255 and usage["shared"] <= 227 * 1024, variant
        assert usage["programs"] >= 1, variant


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_the_table_has_attention_of_every_head_size(architecture: str) -> None:
    """For one token, trees of 16 and 64 nodes and windows, the table has attention in bfloat16 of
    each size, and the kernel that appends its keys."""
    variants = json.loads(TABLE.read_text())[architecture]
    split = [re.search(r"_split_kernel bf16 .*HEAD_SIZE=(\d+)", variant) for variant in variants]
    append = [re.search(r"_append_kernel bf16 .*HEAD_SIZE=(\d+)", variant) for variant in variants]
    counts = Counter(int(match[1]) for match in split if match)
    assert {*counts} == {int(match[1]) for match in append if match} == {64, 80, 96, 128, 256}
    # With heads of 256, trees of 16 and of 64 nodes have tiles of one size.
    assert counts[256] == 3 and all(counts[size] == 4 for size in (64, 80, 96, 128))


def test_the_page_has_the_registers_of_a_training() -> None:
    """docs/engine.md shows registers and programs of the kernels of a training, as in the table."""
    table = json.loads(TABLE.read_text())
    lines = (FOLDER.resolve().parent / "docs" / "engine.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| kernel of a training"))
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines[start + 2 :]]
    rows = rows[: next(i for i, row in enumerate(rows) if len(row) == 1)]
    kernels = {
        "norm": "_norm_kernel bf16 fp32 BLOCK=4096",
        "norm, gradients": "_norm_gradient_kernel bf16 fp32 BLOCK=4096",
        "gated unit": "_gated_unit_kernel bf16 ",
        "gated unit, gradients": "_gated_gradient_kernel bf16 ",
        "rotation": "_rotate_heads_kernel bf16 BACK=0 BLOCK_D=64",
        "rotation, back": "_rotate_heads_kernel bf16 BACK=1 BLOCK_D=64",
        "later keys": "_add_later_keys_kernel bf16 fp32 BLOCK_D=128",
        "later keys, gradients": "_later_gradient_kernel bf16 fp32 BLOCK_D=128",
    }
    assert [row[0] for row in rows] == [*kernels]
    for name, *numbers in rows:
        hopper, blackwell = (
            next(
                usage for variant, usage in table[kind].items() if variant.startswith(kernels[name])
            )
            for kind in ("sm_90", "sm_100")
        )
        expected = [
            usage[key] for usage in (hopper, blackwell) for key in ("registers", "programs")
        ]
        assert [int(number) for number in numbers[:4]] == expected, name
        assert numbers[4:] == [str(hopper["warps"]), f"{hopper['shared'] / 1024:.1f}"], name


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_every_kernel_is_launched(architecture: str) -> None:
    """Arguments bind, specialise and compile, grids are within bounds, and with the Triton of the
    table every variant takes the resources that it says."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TRITON_INTERPRET", "SPECTRAIN_KERNELS")
    }
    number = architecture.removeprefix("sm_")
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.rehearsal", number]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(run.stdout.splitlines()[-1])
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    if os.environ.get("SPECTRAIN_COUNT") == "1":
        table |= {"triton": triton.__version__, architecture: result["resources"]}
        TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    assert set(result["launches"]) == list_kernels()
    assert all(
        usage["stack"] <= allowed_stack(variant) for variant, usage in result["resources"].items()
    )
    assert result["resources"].keys() == table[architecture].keys()
    if table["triton"] == triton.__version__:
        assert result["resources"] == table[architecture]
