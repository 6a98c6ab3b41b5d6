"""Waiting threads sleep unless the environment says how they wait, and engines do not inherit that."""

import os
import subprocess
import sys

import pytest

from spectrain.config.environment import WAIT_VARIABLES

# Loads torch's OpenMP library as torch does, without torch.
PROGRAM = """
import ctypes, importlib.util, pathlib, sys
import spectrain
from spectrain.config.environment import inherited_environment
assert "torch" not in sys.modules
folder = pathlib.Path(importlib.util.find_spec("torch").origin).parent / "lib"
ctypes.CDLL(str(next(folder.glob("libgomp*"))))
print(inherited_environment().get("OMP_WAIT_POLICY"))
"""


@pytest.mark.parametrize(
    ("given", "spins", "inherited"),
    [({}, "0", "None"), ({"OMP_WAIT_POLICY": "passive"}, "0", "passive"), ({"GOMP_SPINCOUNT": "7"}, "7", "None")],
)
def test_threads_sleep_from_the_first_import(given: dict[str, str], spins: str, inherited: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in WAIT_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**environment, "OMP_DISPLAY_ENV": "verbose", **given},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr and done.stdout.strip() == inherited
