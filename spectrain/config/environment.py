"""How OpenMP's waiting threads wait. It imports nothing: torch reads these variables while it is
imported.
"""

import os
import sys

# What decides how threads wait, in GNU's, LLVM's and Intel's libraries.
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_set_here: dict[str, str] = {}


def let_threads_sleep() -> None:
    """Let waiting threads sleep instead of spin, unless torch is imported already or the
    environment says how they wait.

    Two spinning threads take a core from every other process and lose it to them: beside one busy
    process a step of SmolLM2 with two threads took four times as long. An idle machine is up to a
    sixth slower for it (docs/results/speed.md).
    """
    if "torch" not in sys.modules and not any(os.environ.get(name) for name in WAIT_VARIABLES):
        _set_here["OMP_WAIT_POLICY"] = os.environ["OMP_WAIT_POLICY"] = "passive"


def inherited_environment() -> dict[str, str]:
    """Return the environment for another program, without what `let_threads_sleep` set for this
    one.
    """
    return {name: value for name, value in os.environ.items() if _set_here.get(name) != value}
