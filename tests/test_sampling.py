"""Which cases of a sweep `make test` runs: a few, always the same, and among them every value of
every parameter.
"""

import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from tests.sampling import Case, cover_pairs, pairwise, sample

CASES: list[Case] = [
    (f"test[{size}-{tree}-{seed}]", {"size": size, "tree": tree, "seed": seed})
    for size, tree, seed in product((1, 5, 64), ("chain", "star"), range(9))
]


def list_values(sampled: set[str], key: str) -> set[Any]:
    return {parameters[key] for name, parameters in CASES if name in sampled}


@pytest.mark.parametrize("keep", [1, 4, 20, 54, 99])
def test_every_value_occurs(keep: int) -> None:
    """A sample has the first case, every value of every parameter but the free ones, and the
    requested number of cases.
    """
    sampled = sample(CASES, keep, free=("seed",))
    assert (
        CASES[0][0] in sampled
        and list_values(sampled, "size") == {1, 5, 64}
        and list_values(sampled, "tree") == {"chain", "star"}
    )
    assert len(sampled) == min(max(keep, 3), len(CASES))
    assert list_values(sample(CASES, keep), "seed") == set(range(9))


def test_the_sample_stays() -> None:
    """The sample follows from the ids: more cases, or another order after the first, change
    little or nothing.
    """
    sampled = sample(CASES, 10)
    assert (
        sampled == sample(CASES[:1] + CASES[:0:-1], 10)
        and len(sampled & sample(CASES[:-9], 10)) > 5
    )


def test_cheap_cases_come_first() -> None:
    """Of two cases with equally many new values the cheaper one is sampled, and an expensive
    value occurs once.
    """
    sampled = sample(CASES, 12, cost=lambda size, tree, seed: float(size))
    assert sum("[64-" in name for name in sampled) == 1


def test_every_pair_meets() -> None:
    """Every two choices on different axes stand in one case, and there are far fewer cases than
    in the whole product.
    """
    axes: list[tuple[Any, ...]] = [
        (1, 5, 64),
        ("chain", "star"),
        (None, 2.0),
        range(4),
        (False, True),
    ]
    cases = pairwise(*axes)
    for first, second in combinations(range(len(axes)), 2):
        assert {(case[first], case[second]) for case in cases} == set(
            product(axes[first], axes[second])
        )
    assert len(cases) <= 24 and cases == pairwise(*axes)


def test_the_cover_has_every_pair() -> None:
    """The cover has the sample, and every two values that stand together in the whole grid stand
    together in one of its cases. It is much smaller than the grid, and always the same.
    """
    sampled = sample(CASES, 4)
    covered = cover_pairs(CASES, sampled)
    assert sampled <= covered and len(covered) < 0.6 * len(CASES)
    for first, second in combinations(("size", "tree", "seed"), 2):
        pairs = {
            (parameters[first], parameters[second]) for name, parameters in CASES if name in covered
        }
        assert pairs == {(parameters[first], parameters[second]) for _, parameters in CASES}
    assert covered == cover_pairs(CASES[:1] + CASES[:0:-1], sampled)


def test_the_cover_of_at_most_two_parameters_leaves_nothing_out() -> None:
    for keys in (("size",), ("size", "tree")):
        cases = [(name, {key: values[key] for key in keys}) for name, values in CASES]
        distinct = {tuple(values.values()) for _, values in cases}
        covered = cover_pairs(cases, sample(cases, 1))
        values_by_name = dict(cases)
        assert {tuple(values_by_name[name].values()) for name in covered} == distinct


CONFTEST = """
import pytest
from tests.sampling import thin_sweeps

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    left_out = thin_sweeps(items)
    items[:] = [item for item in items if item not in left_out]
"""
SWEEP = """
import pytest

@pytest.mark.sweep(2)
@pytest.mark.parametrize("tree", ["chain", "star"])
@pytest.mark.parametrize("size", range(6))
def test_sweep(size, tree): ...

@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tree", ["chain", "star"])
@pytest.mark.parametrize("size", range(3))
def test_slow_sweep(size, tree, seed): ...

@pytest.mark.parametrize("size", range(6))
def test_other(size): ...
"""


def test_the_rest_is_slow(tmp_path: Path) -> None:
    """What is in no sample is left out by -m "not slow" and runs with the slow tests, where it
    has a pair of values that no other case has; other tests are left alone.
    """
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(SWEEP)
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    for which, count in (("not slow", 12), ("slow", 15), ("slow or not slow", 27)):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--rootdir",
            ".",
            "-c",
            os.devnull,
            "-m",
            which,
            "test_it.py",
        ]
        ran = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert f"{count} passed" in ran.stdout, ran.stdout
