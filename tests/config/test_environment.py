"""Waiting threads sleep unless the environment says how they wait, and engines do not inherit
that.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spectrain.config.environment import WAIT_VARIABLES

TORCH = importlib.util.find_spec("torch")
LIBRARIES = (
    []
    if TORCH is None or TORCH.origin is None
    else sorted((Path(TORCH.origin).parent / "lib").glob("libgomp*"))
)
# Loads torch's OpenMP library as torch does, without torch.
PROGRAM = """
import ctypes, sys
import spectrain
from spectrain.config.environment import inherited_environment
assert "torch" not in sys.modules
ctypes.CDLL(sys.argv[1])
print(inherited_environment().get("OMP_WAIT_POLICY"))
"""


@pytest.mark.skipif(not LIBRARIES, reason="torch has another OpenMP library than GNU's here")
@pytest.mark.parametrize(
    ("variables", "spins", "inherited"),
    [
        ({}, "0", "None"),
        ({"OMP_WAIT_POLICY": "passive"}, "0", "passive"),
        ({"GOMP_SPINCOUNT": "7"}, "7", "None"),
    ],
)
def test_threads_sleep_from_the_first_import(
    variables: dict[str, str], spins: str, inherited: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in WAIT_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(LIBRARIES[0])],
        env={**environment, "OMP_DISPLAY_ENV": "verbose", **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr and done.stdout.strip() == inherited
