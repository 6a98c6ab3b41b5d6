"""Which cases of a sweep `make test` runs: a few, always the same, and among them every value of every parameter."""

import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from tests.sampling import Case, pairwise, sample

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


def test_every_pair_meets() -> None:
    """Every two choices on different axes stand in one case, and there are far fewer cases than in the whole product."""
    axes: list[tuple[Any, ...]] = [(1, 5, 64), ("chain", "star"), (None, 2.0), range(4), (False, True)]
    cases = pairwise(*axes)
    for one, other in combinations(range(len(axes)), 2):
        assert {(case[one], case[other]) for case in cases} == set(product(axes[one], axes[other]))
    assert len(cases) <= 24 and cases == pairwise(*axes)


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
