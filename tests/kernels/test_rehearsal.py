"""What the first GPU will be asked to launch is launched here: every kernel, by Triton's own
path, compiled for sm_90.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed, so nothing can be launched")
KERNELS = {
    "_split_kernel",
    "_combine_kernel",
    "_choose_kernel",
    "parts_kernel",
    "candidates_kernel",
    "_walk_kernel",
    "_reject_kernel",
    "_bonus_kernel",
    "_append_kernel",
    "_commit_kernel",
    "_row_kl_kernel",
    "_row_best_kernel",
    "_emit_kernel",
    "_likeliest_kernel",
    "_append_children_kernel",
    "_log_kernel",
}


@pytest.mark.slow
def test_every_kernel_is_launched() -> None:
    """Arguments bind, specialise and compile, grids are within bounds, and half precision spills
    nothing; exact float32 attention a few words."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TRITON_INTERPRET", "SPECTRAIN_KERNELS")
    }
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.rehearsal"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert set(result["launches"]) == KERNELS
    assert all(
        name == "_split_kernel" and stack <= 64 for name, stack in result["spilled"].items()
    ), result["spilled"]
