"""Real decoding of many texts has the target's distribution, for every lossless rule with the trees that it takes.

Enumerations prove one round. Here rounds follow one another, so a random number that two rounds share is found too: with coins
keyed by position alone, block verification fails with p below 1e-6.
"""

import pytest

from spectrain.models.target import Target

from .known_target import CASES, Case, make_known_target, outputs_of, test_fit

# With fixed seeds a case always has the same p-value.
LEVEL = 1e-4
QUICK = {
    "chain, chain of 3": 2_000,
    "block, chain of 3": 2_000,
    "recursive, sampled tree": 2_000,
    "traversal, sampled tree": 300,
    "match, sampled tree": 2_000,
}
"""Cases that every run of the tests decodes, and their numbers of texts."""


@pytest.fixture(scope="module")
def known_target() -> Target:
    return make_known_target()


@pytest.mark.parametrize("case", [case for case in CASES if case.name in QUICK], ids=lambda case: case.name)
def test_decoded_texts_have_the_targets_distribution(case: Case, known_target: Target) -> None:
    fit = test_fit(outputs_of(case.decode(known_target, QUICK[case.name], seed=0)))
    assert fit.p_value > LEVEL, fit


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_many_texts_have_the_targets_distribution(case: Case, seed: int, known_target: Target) -> None:
    fit = test_fit(outputs_of(case.decode(known_target, 10_000, seed)))
    assert fit.p_value > LEVEL, fit


@pytest.mark.slow
@pytest.mark.parametrize("name", ["block, chain of 3", "traversal, sampled tree", "recursive, sampled tree"])
def test_texts_do_not_depend_on_the_batch(name: str, known_target: Target) -> None:
    case = next(case for case in CASES if case.name == name)
    alone = outputs_of(case.decode(known_target, 60, seed=0, batch_size=1))
    assert outputs_of(case.decode(known_target, 60, seed=0, batch_size=3)) == alone
