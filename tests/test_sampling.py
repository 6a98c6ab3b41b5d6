"""Which cases of a sweep `make test` runs: a few, always the same, and among them every value of every parameter."""

import ast
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import spectrain
from spectrain.export.layouts import FORMATS
from tests.reach import reached
from tests.sampling import EVERY, Case, sample

CASES: list[Case] = [
    (f"test[{size}-{tree}-{seed}]", {"size": size, "tree": tree, "seed": seed})
    for size, tree, seed in product((1, 5, 64), ("chain", "star"), range(9))
]


def values(kept: set[str], key: str) -> set[Any]:
    return {parameters[key] for name, parameters in CASES if name in kept}


@pytest.mark.parametrize("keep", [1, 4, 20, 54, 99])
def test_every_value_occurs(keep: int) -> None:
    """The first case, every value of every parameter but the free ones, and as many cases as are asked for."""
    kept = sample(CASES, keep, free=("seed",))
    assert CASES[0][0] in kept and values(kept, "size") == {1, 5, 64} and values(kept, "tree") == {"chain", "star"}
    assert len(kept) == min(max(keep, 3), len(CASES))
    assert values(sample(CASES, keep), "seed") == set(range(9))


def test_the_sample_stays() -> None:
    """It follows from the ids: others beside them, or another order behind the first, change little or nothing."""
    kept = sample(CASES, 10)
    assert kept == sample(CASES[:1] + CASES[:0:-1], 10) and len(kept & sample(CASES[:-9], 10)) > 5


def test_cheap_cases_come_first() -> None:
    """Of two cases that say as much the cheaper one is kept, and a dear value is met once."""
    kept = sample(CASES, 12, cost=lambda size, tree, seed: float(size))
    assert sum("[64-" in name for name in kept) == 1


CONFTEST = """
import pytest
from tests.sampling import mark_what_is_left_out

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items): mark_what_is_left_out(items)
"""
SWEEP = """
import pytest

@pytest.mark.sweep(2)
@pytest.mark.parametrize("tree", ["chain", "star"])
@pytest.mark.parametrize("size", range(6))
def test_sweep(size, tree): ...

@pytest.mark.parametrize("size", range(6))
def test_other(size): ...
"""


def test_the_rest_is_slow(tmp_path: Path) -> None:
    """What is in no sample is left out by -m "not slow" and runs with the slow tests; other tests are left alone."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(SWEEP)
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for which, count in (("not slow", 12), ("slow", 6), ("slow or not slow", 18)):
        command = [sys.executable, "-m", "pytest", "-q", "--rootdir", ".", "-c", os.devnull, "-m", which, "test_it.py"]
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert f"{count} passed" in ran.stdout, ran.stdout


# What the sample leaves out


@pytest.fixture(scope="module")
def tests(request: pytest.FixtureRequest) -> tuple[set[str], set[str]]:
    """What all tests speak of, and what those do that run now; only where the whole suite was collected."""
    root = Path(__file__).parent
    files = {path for path in root.rglob("test_*.py") if "engines" not in path.relative_to(root).parts}
    every = [item for item in request.session.stash[EVERY] if isinstance(item, pytest.Function)]
    if missing := files - {item.path for item in every}:
        pytest.skip(f"only a part of the suite was collected, without {min(missing).name}")
    words = {item.nodeid: reached(item) for item in every}
    now = {item.nodeid for item in request.session.items}
    return set().union(*words.values()), set().union(*(found for name, found in words.items() if name in now))


def choices(group: str) -> dict[str, str]:
    """Every choice of a group of settings, and the class or function behind it."""
    files = sorted((Path(spectrain.__file__).parent / "conf" / group).glob("*.yaml"))
    return {path.stem: OmegaConf.load(path).get("_target_", "") for path in files}


@pytest.mark.parametrize("group", ["drafter", "tree", "acceptance", "source", "writer", "tracker", "recipe"])
def test_every_choice_is_tested(tests: tuple[set[str], set[str]], group: str) -> None:
    """Families, trees, rules, recipes: each is named by a test that runs, by its class or as a setting."""
    _, now = tests
    classes = {name.rpartition(".")[2] for name in now if name.startswith("spectrain.")}
    left = [name for name, target in choices(group).items()
            if not {name, f"{group}={name}"} & now and target.rpartition(".")[2] not in classes]  # fmt: skip
    assert choices(group) and not left


def test_every_layout_and_kernel_is_tested(tests: tuple[set[str], set[str]]) -> None:
    """The layouts of each format by a test that runs, and each public function of the kernels."""
    _, now = tests
    assert FORMATS.keys() <= now
    kernels = Path(spectrain.__file__).parent / "kernels"
    functions = {
        f"spectrain.kernels.{path.stem}.{node.name}"
        for path in kernels.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not node.decorator_list
    }
    assert functions and not functions - now


def test_nothing_is_left_to_slow_tests_alone(tests: tuple[set[str], set[str]]) -> None:
    """Whatever function or class of the package a slow test names, a quick one names too."""
    every, now = ({name for name in words if name.startswith("spectrain.")} for words in tests)
    assert every == now, every - now
