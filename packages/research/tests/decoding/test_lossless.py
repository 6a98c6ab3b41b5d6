"""The tests of tests/decoding/test_lossless.py that are about ideas."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from spectrain.decoding.acceptance import Greedy, Match
from spectrain.decoding.acceptance import rejection as weighing
from spectrain.decoding.acceptance import sequential as walking
from spectrain.decoding.acceptance.rejection import Block, RecursiveRejection, SpeculativeSampling
from spectrain.decoding.acceptance.sequential import SequentialRule
from spectrain.decoding.acceptance.typical import TypicalAcceptance
from spectrain.errors import UserError
from spectrain.trees.token_tree import Children, TokenTree
from spectrain_research.on_policy.interleaved import InterleavedSampling
from spectrain_research.transport import rules as transport
from spectrain_research.transport.linear_program import TruncatedLinearProgram
from spectrain_research.transport.rules import ImportanceSampling, KSeq, SpecHub, Transport
from spectrain_research.traversal import rule as traversal
from spectrain_research.traversal.rule import Traversal
from tests.decoding.test_lossless import (
    BRANCHED,
    BRANCHING,
    CHAINS,
    KINDS,
    SEVERAL,
    SHAPES,
    WRONG,
    Draft,
    Wrong,
    acceptance_by_node,
    accepted_lengths,
    drawn,
    emitted,
    every,
    expected_value,
    judge_uniform,
    models,
    of_a_pass,
    random_trials,
    siblings_of,
    target_joint,
    top_and_sampled,
)

INDEPENDENT = (KSeq(), ImportanceSampling(), TruncatedLinearProgram(truncated=2))


@pytest.mark.sweep(9)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize(
    "rule",
    [
        KSeq(),
        ImportanceSampling(),
        ImportanceSampling(sharpness=1),
        TruncatedLinearProgram(),
        TruncatedLinearProgram(truncated=2),
    ],
    ids=["kseq", "sharp", "plain", "programme", "truncated"],
)
def test_rules_for_independent_drafts_are_lossless(
    rule: SequentialRule, name: str, kind: str
) -> None:
    """Judging children drawn independently, then going on with the target, gives the target's
    joint distribution exactly.
    """
    for p, q, length in list(random_trials(kind, SEVERAL[name]))[::3]:
        assert emitted(rule, drawn(SEVERAL[name], "sampled"), p, q, False, length) == target_joint(
            p, length
        )


@pytest.mark.sweep(9)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("rule", [Transport(), SpecHub(), Traversal()], ids=lambda rule: rule.name)
def test_top_and_sampled_children_are_lossless(rule: SequentialRule, name: str, kind: str) -> None:
    """A node's likeliest children and one drawn from the rest of q: the target's joint
    distribution exactly.
    """
    if rule.name == "spechub" and name == "3":
        pytest.skip("it judges two drafts")
    for p, q, length in random_trials(kind, SEVERAL[name]):
        assert emitted(rule, top_and_sampled(SEVERAL[name]), p, q, False, length) == target_joint(
            p, length
        )


JUDGED = [
    *(
        (rule, "1-1-1")
        for rule in (SpeculativeSampling(), RecursiveRejection(), Block(), Traversal())
    ),
    *((rule, name) for rule in (RecursiveRejection(), Traversal()) for name in ("2-2", "lopsided")),
]


@pytest.mark.sweep(8, free=("seed",))
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("knows", ["place", "token", "candidates"])
@pytest.mark.parametrize("rule, name", JUDGED, ids=lambda value: getattr(value, "name", value))
def test_parallel_drafts_are_lossless(
    rule: SequentialRule, name: str, knows: str, seed: int
) -> None:
    """Distributions that slots share, that hang on a parent alone, or that leave tokens out: the
    output is the target's.
    """
    length = max(map(len, SHAPES[name])) + 1
    p, q = of_a_pass(knows, 2 if name == "lopsided" else 3, length, seed)
    for children in ("sampled", "without_replacement"):
        result = emitted(
            rule, drawn(SHAPES[name], children), p, q, children == "without_replacement", length
        )
        assert result == target_joint(p, length)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["1", "2", "3"])
def test_acceptance_chances_for_several_drafts_equal_enumeration(name: str, kind: str) -> None:
    """The same holds for rules that take their drafts together, by the drafts that each of them
    takes; equal tokens count as one."""
    for p, q, _ in itertools.islice(random_trials(kind, SHAPES[name]), 3):
        taken: list[tuple[SequentialRule, Draft]] = [
            (rule, drawn(SHAPES[name], "sampled")) for rule in INDEPENDENT
        ]
        for rule, draft in [
            *taken,
            (Transport(), top_and_sampled(SHAPES[name])),
            (Traversal(), top_and_sampled(SHAPES[name])),
        ]:
            for _, tree in every(partial(draft, q)):
                if not tree.children[0]:
                    continue
                accepted = acceptance_by_node(rule, tree, p, q, False)
                result = rule.acceptance_chances(siblings_of(tree, 0, p, q, False))
                assert result == [accepted[child] for child in tree.children[0]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHAINS)
def test_traversal_of_a_chain_equals_block_verification(name: str, kind: str) -> None:
    """On chains both accept each number of tokens with the same probability."""
    draft = drawn(CHAINS[name], "sampled")
    for p, q, _ in random_trials(kind, CHAINS[name]):
        assert accepted_lengths(Traversal(), draft, p, q, False) == accepted_lengths(
            Block(), draft, p, q, False
        )


@pytest.mark.sweep(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("children", ["sampled", "without_replacement"])
@pytest.mark.parametrize("name", ["2", "3", "2-1", "1-2", "2-2", "lopsided"])
def test_traversal_accepts_at_least_as_much_as_recursion(
    name: str, children: Children, kind: str
) -> None:
    """Traversal verification never expects fewer accepted tokens; one level deep it expects just
    as many.
    """
    shape = BRANCHING[name]
    without_replacement = children == "without_replacement"
    for p, q, length in random_trials(kind, shape):
        rates = [
            expected_value(
                accepted_lengths(rule, drawn(shape, children), p, q, without_replacement)
            )
            for rule in (RecursiveRejection(), Traversal())
        ]
        assert rates[0] == rates[1] if length == 2 else rates[0] <= rates[1]


@pytest.mark.sweep(14, free=("wrong",))
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_wrong_variant_fails_the_enumeration(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof finds another joint distribution than the target's, and still one that sums to
    1.
    """
    for module in (walking, weighing, transport, traversal) if wrong.patch is not None else ():
        monkeypatch.setattr(module, *wrong.patch, raising=False)
    caught = 0
    for seed in range(6):
        p, q = models("dense", 4, 3, seed)
        result = emitted(wrong.rule, wrong.draft, p, q, wrong.without_replacement, 3)
        assert sum(result.values()) == 1
        caught += result != target_joint(p, 3)
    assert caught >= 3


@pytest.mark.parametrize("rule", [*INDEPENDENT, Transport(), SpecHub()], ids=lambda rule: rule.name)
def test_rules_for_several_drafts_refuse_other_children(rule: SequentialRule) -> None:
    """Each takes one kind of children; the others are refused under its name, with which to use."""
    q = torch.full((1, 3, 3), 1 / 3)
    for children in ("deterministic", "sampled", "without_replacement", "top_and_sampled"):
        tree = replace(BRANCHED, children=children, q=q.clone())
        if children in rule.children:
            assert judge_uniform(rule, tree).counts.item() <= 2
            continue
        with pytest.raises(
            UserError,
            match=rf"^acceptance={rule.name}: .*use tree\.children={rule.children[0]} with it",
        ):
            judge_uniform(rule, tree)


def test_spechub_refuses_three_drafts() -> None:
    """A node of three children is refused, with a tree of two and with the rule that takes more."""
    tokens = torch.tensor([[0, 0, 1, 2]])
    parents = torch.tensor([[-1, 0, 0, 0]])
    tree = replace(
        TokenTree.from_parents(tokens, parents),
        children="top_and_sampled",
        q=torch.full((1, 4, 3), 1 / 3),
    )
    with pytest.raises(
        UserError,
        match=r"^acceptance=spechub: .* has 3 children; use tree=cartesian .*acceptance=transport",
    ):
        SpecHub()(tree, torch.zeros(1, 4, 3), torch.zeros(1, dtype=torch.int64), tree.depths)


@pytest.mark.parametrize("sharpness", [0, 21])
def test_equal_importance_weights_are_refused(sharpness: int) -> None:
    """A sharpness beyond the largest power of a weight would make all drafts alike, which asks
    for the opposite of that.
    """
    with pytest.raises(UserError, match=rf"^acceptance\.sharpness={sharpness}: use 1 to 20"):
        ImportanceSampling(sharpness=sharpness)


@pytest.mark.parametrize("truncated", [0, 33])
def test_truncation_out_of_range_is_refused(truncated: int) -> None:
    with pytest.raises(UserError, match=rf"^acceptance\.truncated={truncated}: use 1 to 32"):
        TruncatedLinearProgram(truncated=truncated)


def test_lossy_rules_are_marked_lossy() -> None:
    """Typical acceptance, and the interleaving that on-policy training writes with, are not
    lossless; every other rule is.
    """
    assert not TypicalAcceptance.lossless and not InterleavedSampling.lossless
    several = (KSeq, ImportanceSampling, TruncatedLinearProgram, Transport, SpecHub)
    assert all(
        rule.lossless
        for rule in (
            Greedy,
            Match,
            SpeculativeSampling,
            RecursiveRejection,
            Block,
            Traversal,
            *several,
        )
    )
