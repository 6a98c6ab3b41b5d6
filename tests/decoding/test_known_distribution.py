"""Real decoding of many texts has the target's distribution, for every lossless rule with the trees
that it takes.

Enumerations prove one round. Here rounds follow one another, so a random number that two rounds
share is found too: with coins keyed by position alone, block verification fails with p below 1e-6.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spectrain.decoding.acceptance import Match
from spectrain.decoding.acceptance.rejection import Block, RecursiveRejection, SpeculativeSampling
from spectrain.trees import TreeBuilder
from tests.installed import load_cases
from tests.trees.test_every import FILES, make_builder

from .known_target import CASES, Case, chain

INSTALLED = load_cases(__name__)
# Cases of installed packages, in which several parts work together.
VARIANTS: list[Case] = INSTALLED.get("VARIANTS", [])
# Those of them that decode one text at once, and three.
SMALL_BATCHES: list[Case] = INSTALLED.get("SMALL_BATCHES", [])
# Those whose rounds do not depend on the number of texts.
INVARIANT: list[Case] = INSTALLED.get("INVARIANT", [])
# Chains of the lengths that no other case has, for every rule that has one of 3.
CHAINS = [
    replace(case, name=f"{case.name[:-1]}{depth}", make_builder=chain(depth))
    for case in CASES
    if case.name.endswith("chain of 3")
    for depth in (1, 2, 4)
]


def list_tree_cases() -> Iterator[Case]:
    """List the trees of conf/tree as their files have them, by the rule that takes each: those of
    most likely tokens, and those of drawn ones where a builder can draw.
    """
    for file in FILES:
        if make_builder(file) is None:
            continue
        yield Case(f"match, tree={file.stem}", Match, lambda seed, file=file: make_builder(file))
        drawn = make_builder(file, temperature=1.0)
        if drawn is not None:
            rules = [SpeculativeSampling, Block] if drawn.traits.is_chain else [RecursiveRejection]
            for rule in rules:
                yield Case(
                    f"{rule.name}, tree={file.stem}",
                    rule,
                    lambda seed, file=file: seed_builder(file, seed),
                )


def seed_builder(file: Path, seed: int) -> TreeBuilder | None:
    """Make a builder whose children are drawn, with this seed."""
    builder = make_builder(file, temperature=1.0)
    assert builder is not None
    builder.seed = seed
    return builder


TREES = [*list_tree_cases()]
# With fixed seeds a case always has the same p-value.
LEVEL = 1e-4
QUICK = {
    "chain, chain of 3": 2_000,
    "block, chain of 3": 1_000,
    "recursive, sampled tree": 2_000,
    "traversal, sampled tree": 300,
    "match, sampled tree": 2_000,
}
"""Cases that every run of the tests decodes, and their numbers of texts."""
MANY = ["chain, chain of 3", "recursive, sampled tree", "match, sampled tree"]
"""Cases that decode 2,500 texts in less than a second."""


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in QUICK], ids=lambda case: case.name
)
def test_decoded_texts_have_the_targets_distribution(case: Case) -> None:
    fit = case.test(case.sample(QUICK[case.name], seed=0))
    assert fit.p_value > LEVEL, fit


@pytest.mark.parametrize(
    "case",
    [case for case in (*TREES, *CHAINS) if not case.name.startswith("match")],
    ids=lambda case: case.name,
)
def test_every_drawn_tree_has_the_targets_distribution(case: Case) -> None:
    """A new tree is among them by itself."""
    fit = case.test(case.sample(1_000, seed=0))
    assert fit.p_value > LEVEL, fit


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("case", [*CASES, *CHAINS, *TREES, *VARIANTS], ids=lambda case: case.name)
def test_many_texts_have_the_targets_distribution(case: Case, seed: int) -> None:
    fit = case.test(case.sample(10_000, seed))
    assert fit.p_value > LEVEL, fit


@pytest.mark.slow
@pytest.mark.parametrize("case", SMALL_BATCHES, ids=lambda case: case.name)
def test_texts_of_small_batches_have_the_targets_distribution(case: Case) -> None:
    """What a round drafts may depend on the number of texts, so that equal texts cannot be asked
    for.
    """
    fit = case.test(case.sample(10_000, seed=1))
    assert fit.p_value > LEVEL, fit


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_a_distance_of_one_percent_is_visible(name: str) -> None:
    """130,000 texts: a token whose distribution is 0.01 from the target's would be found
    at every position with a chance of 99 %.
    """
    case = next(case for case in CASES if case.name == name)
    fits = case.test_positions(case.sample(130_000, seed=3))
    assert max(fit.visible for fit in fits) < 0.01
    assert min(fit.p_value for fit in fits) > LEVEL, fits


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *CHAINS, *INVARIANT], ids=lambda case: case.name)
def test_texts_do_not_depend_on_the_batch(case: Case) -> None:
    """So batches of one and of three texts have the distribution of the large ones, whose texts the
    tests above count.
    """
    texts = case.sample(60, seed=0)
    assert len({*texts}) > 10
    assert case.sample(60, seed=0, batch_size=3) == texts
    assert case.sample(60, seed=0, batch_size=1) == texts


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "chain, chain of 3",
        "recursive, sampled tree",
        "recursive, tree without replacement",
        "match, most likely tree",
    ],
)
def test_rules_on_the_device_decode_the_same_texts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of a GPU, interpreted, draw what the references draw, so that the texts have
    the same distribution.
    """
    pytest.importorskip(
        "triton", reason="triton is not installed, so there are no kernels to interpret"
    )
    case = next(case for case in CASES if case.name == name)
    expected = case.sample(20, seed=0)
    monkeypatch.setenv("SPECTRAIN_KERNELS", "triton")
    assert case.sample(20, seed=0) == expected
