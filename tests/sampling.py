"""Of a long sweep `make test` runs a sample, and `make test-full` a cover of all pairs of values.

    @pytest.mark.sweep(8)                   # at least eight cases
    @pytest.mark.sweep(8, free=("seed",))   # whose seeds need not all occur
    @pytest.mark.sweep(8, cost=seconds_of)  # cheap ones: cost is called with the parameters

The first case is always in the sample, and so is every value of every parameter that is not free:
each dtype, tree, rule and family still runs, only not in every combination. Which cases fill it up
follows from their ids, so it is the same everywhere. A test that is marked as slow has no sample.

The cover has the sample, and every two values of different parameters, free ones too, that some
case has together. A fault that needs three values at once is rare, and a grid of five parameters
has ten times as many cases as pairs need. So a sweep of one parameter or two runs as a whole. What
is in no cover is not a test: pytest counts it as deselected. A case that is named alone still runs.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import Any
from zlib import crc32

import pytest

Case = tuple[str, dict[str, Any]]  # the id of a test, its parameters


def flatten_parameters(parameters: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every parameter and its value, and instead of a named tuple its fields."""
    for key, value in parameters.items():
        if hasattr(value, "_asdict"):
            yield from value._asdict().items()
        else:
            yield key, value


def sample(
    cases: Sequence[Case],
    keep: int,
    free: Sequence[str] = (),
    cost: Callable[..., float] | None = None,
) -> set[str]:
    """Return the ids of at least `keep` cases, the first among them, in which every value of
    every parameter occurs.
    """
    values = {
        name: {
            (key, repr(value)) for key, value in flatten_parameters(parameters) if key not in free
        }
        for name, parameters in cases
    }
    price = {name: cost(**parameters) if cost else 1.0 for name, parameters in cases}
    sampled = [cases[0][0]]
    missing = set[Any]().union(*values.values()) - values[sampled[0]]
    others = sorted((name for name, _ in cases[1:]), key=lambda name: (crc32(name.encode()), name))
    while others and (missing or len(sampled) < keep):
        best = max(
            others, key=lambda name: (len(values[name] & missing) / price[name], -price[name])
        )
        sampled.append(best)
        others.remove(best)
        missing -= values[best]
    return set(sampled)


def cover_pairs(cases: Sequence[Case], sampled: set[str]) -> set[str]:
    """Return the sample and the further cases that together have every pair of values of
    different parameters which occurs in any case.
    """

    def list_pairs(parameters: dict[str, Any]) -> set[Any]:
        values = sorted((key, repr(value)) for key, value in flatten_parameters(parameters))
        return set(combinations(values, 2)) if len(values) > 1 else set(values)

    pairs = {name: list_pairs(parameters) for name, parameters in cases}
    covered = set(sampled)
    missing = set[Any]().union(*pairs.values())
    for name in sampled:
        missing -= pairs[name]
    others = sorted(pairs.keys() - sampled, key=lambda name: (crc32(name.encode()), name))
    while missing:
        best = max(others, key=lambda name: len(pairs[name] & missing))
        covered.add(best)
        others.remove(best)
        missing -= pairs[best]
    return covered


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return few cases with a choice on each axis, in which every two choices on different axes
    meet.
    """
    draw = random.Random(0)

    def list_pairs(choices: tuple[Any, ...]) -> set[Any]:
        return set(combinations(enumerate(choices), 2))

    indexed = [[(axis, value) for value in values] for axis, values in enumerate(axes)]
    left = {pair for first, second in combinations(indexed, 2) for pair in product(first, second)}
    cases = []
    while left:
        candidates = [tuple(draw.choice(values) for values in axes) for _ in range(60)]
        best = list(max(candidates, key=lambda choices: len(list_pairs(choices) & left)))
        if not list_pairs(tuple(best)) & left:
            for axis, value in min(left, key=repr):
                best[axis] = value
        left -= list_pairs(tuple(best))
        cases.append(tuple(best))
    return cases


def thin_sweeps(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Mark the cases of sweeps that are in no sample as slow, and return those that are in no
    cover either.
    """
    sweeps = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sweep"):
            sweeps[item.nodeid.split("[")[0]].append(item)
    left_out = set[pytest.Item]()
    for functions in sweeps.values():
        mark = functions[0].get_closest_marker("sweep")
        assert mark is not None
        cases = [(function.nodeid, function.callspec.params) for function in functions]
        sampled = sample(cases, *mark.args, **mark.kwargs)
        covered = cover_pairs(cases, sampled)
        for function in functions:
            if function.nodeid not in sampled:
                function.add_marker(pytest.mark.slow)
            if function.nodeid not in covered:
                left_out.add(function)
    return left_out
