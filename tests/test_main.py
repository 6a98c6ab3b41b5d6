"""The command in an environment that lacks what it needs."""

import subprocess
import sys
from pathlib import Path

import pytest

from spectrain.output.version import read_version

ROOT = Path(__file__).parents[1]
# Python raises ModuleNotFoundError for a module whose entry is None.
RUN = "import runpy, sys; {}; runpy.run_module('spectrain', run_name='__main__')"
HEAVY = ("torch", "transformers", "yaml", "safetensors", "hydra", "numpy")


def run_without(modules: tuple[str, ...], *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that cannot import these modules."""
    hide = "; ".join(f"sys.modules[{name!r}] = None" for name in modules)
    return subprocess.run(
        [sys.executable, "-c", RUN.format(hide), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_version_needs_no_other_package() -> None:
    done = run_without(HEAVY, "--version")
    assert (done.returncode, done.stdout) == (0, f"spectrain {read_version()}\n"), done.stderr


def test_help_and_recipes_import_nothing_heavy() -> None:
    for words in (["--help"], ["recipes"], ["runs", "."], ["completion", "bash"]):
        done = run_without(("torch", "transformers", "hydra", "numpy"), *words)
        assert "spectrain" in done.stdout + done.stderr and "missing in" not in done.stderr, words


@pytest.mark.parametrize(
    ("module", "words"),
    [("yaml", ["recipes"]), ("torch", ["train", "recipe=eagle3", "target=tiny"])],
    ids=["at the start", "in a setting"],
)
def test_a_missing_module_is_one_sentence(module: str, words: list[str]) -> None:
    done = run_without((module,), *words)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr == (
        f"spectrain: the Python module {module} is missing in {sys.prefix}; install spectrain "
        "again there with all that it requires\n"
    )
