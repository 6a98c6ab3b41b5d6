"""The most that any lossless rule could accept: the closed form equals the linear program, and
no rule lies above either.
"""

import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

from spectrain.decoding.acceptance import Siblings
from spectrain.decoding.acceptance.rejection import Block, RecursiveRejection, SpeculativeSampling
from spectrain.decoding.acceptance.sequential import SequentialRule
from spectrain.trees.token_tree import Children
from spectrain_research.transport.linear_program import TruncatedLinearProgram
from spectrain_research.transport.optimum import optimal_acceptance, optimal_round_length
from spectrain_research.transport.rules import ImportanceSampling, KSeq, SpecHub, Transport
from spectrain_research.traversal.rule import Traversal
from tests.decoding.test_lossless import (
    CHAINS,
    KINDS,
    SEVERAL,
    Draft,
    Model,
    accepted_lengths,
    drawn,
    every,
    expected_value,
    likeliest,
    models,
    random_trials,
    siblings_of,
    top_and_sampled,
    widths,
)

ROUNDING = 1e-7  # of the program's solver
DRAFTS = {
    "deterministic": likeliest,
    "sampled": lambda shape: drawn(shape, "sampled"),
    "without_replacement": lambda shape: drawn(shape, "without_replacement"),
    "top_and_sampled": top_and_sampled,
}
TAKEN: dict[Children, list[SequentialRule]] = {
    "sampled": [
        RecursiveRejection(),
        Traversal(),
        KSeq(),
        ImportanceSampling(),
        ImportanceSampling(sharpness=1),
        TruncatedLinearProgram(),
    ],
    "without_replacement": [RecursiveRejection(), Traversal()],
    "top_and_sampled": [Transport(), Traversal()],
}


def solve_program(draft: Draft, p: Model, q: Model, depth: int) -> float:
    """Return the most that any lossless rule accepts of these drafts."""
    return optimal_round_length(
        [(float(chance), tree.paths) for chance, tree in every(partial(draft, q))], p, depth
    )


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("children", DRAFTS)
def test_closed_form_equals_the_linear_program(children: Children, count: int, kind: str) -> None:
    """Both are equal for children of one node, however they are chosen or drawn, also where there
    are fewer tokens than children."""
    for vocab, seed in ((4, 0), (4, 1), (5, 2), (3, 3)):
        p, q = models(kind, vocab, 1, seed)
        draft = DRAFTS[children](widths(count))
        # what is there for sure is there whatever is drawn
        _, tree = next(every(partial(draft, q)))
        siblings = siblings_of(tree, 0, p, q, children == "without_replacement")
        assert optimal_acceptance(siblings, children) == pytest.approx(
            solve_program(draft, p, q, 1), abs=ROUNDING
        )


def test_probability_within_equals_enumeration() -> None:
    """For peaked and flat q the integral over arrivals is the sum over orders, and so is the
    optimum of it.
    """
    for sharp in (0.3, 3.0, 12.0):
        q = np.exp(sharp * np.random.default_rng(1).normal(size=6))
        q /= q.sum()
        p = np.random.default_rng(2).dirichlet(np.ones(6))
        order = np.argsort(p / q)
        best = 0.0
        for end in range(3, 7):
            inside = 0.0
            for a, b, c in (
                (a, b, c)
                for a in order[:end]
                for b in order[:end]
                for c in order[:end]
                if len({a, b, c}) == 3
            ):
                inside += q[a] * q[b] / (1 - q[a]) * q[c] / (1 - q[a] - q[b])
            best = max(best, inside - p[order[:end]].sum())
        assert optimal_acceptance(
            Siblings([0, 1, 2], p, q), "without_replacement"
        ) == pytest.approx(1 - best, abs=1e-7)


def count_drawn_tokens(children: Children, name: str, kind: str) -> float:
    """Return how many combinations of drawn tokens a rule is enumerated over, by order."""
    return 3.0 ** (len(SEVERAL[name]) if children == "sampled" else 1)


@pytest.mark.sweep(9, cost=count_drawn_tokens)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("children", TAKEN)
def test_no_rule_accepts_more_than_the_optimum(children: Children, name: str, kind: str) -> None:
    """On every tree the program's plan accepts at least what each rule does that takes such
    drafts.
    """
    shape = SEVERAL[name]
    draft = DRAFTS[children](SEVERAL[name])
    rules = TAKEN[children] + (
        [SpeculativeSampling(), Block()] if name in CHAINS and children == "sampled" else []
    )
    for p, q, length in list(random_trials(kind, shape))[:3]:
        best = solve_program(draft, p, q, length - 1)
        for rule in rules:
            assert (
                float(
                    expected_value(
                        accepted_lengths(rule, draft, p, q, children == "without_replacement")
                    )
                )
                <= best + ROUNDING
            )


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHAINS)
def test_block_verification_is_optimal_for_chains(name: str, kind: str) -> None:
    """Of one drawn path no rule accepts more, however long it is (Sun et al., 2024, theorem 2)."""
    draft = drawn(CHAINS[name], "sampled")
    for p, q, length in list(random_trials(kind, CHAINS[name]))[:3]:
        result = expected_value(accepted_lengths(Block(), draft, p, q, False))
        assert float(result) == pytest.approx(solve_program(draft, p, q, length - 1), abs=ROUNDING)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [(2,), (3,), (1, 2), (1, 3), (1, 1, 2)], ids=str)
def test_traversal_is_optimal_where_the_last_level_branches(
    counts: tuple[int, ...], kind: str
) -> None:
    """Of one drawn path that ends in the most likely tokens and one drawn, no rule accepts more in
    a complete round; where the first level branches, one could."""
    for seed in range(3):
        p, q = models(kind, 3, len(counts) + 1, seed)
        draft = top_and_sampled(widths(*counts))
        result = expected_value(accepted_lengths(Traversal(), draft, p, q, False))
        assert float(result) == pytest.approx(solve_program(draft, p, q, len(counts)), abs=ROUNDING)
    p, q = models("dense", 2, 3, 1)
    draft = top_and_sampled(widths(2, 1))
    assert (
        float(expected_value(accepted_lengths(Traversal(), draft, p, q, False)))
        < solve_program(draft, p, q, 2) - 0.01
    )


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SEVERAL)
def test_matching_is_optimal_for_deterministic_children(name: str, kind: str) -> None:
    """Where nothing is drawn, what sample-and-match accepts, the chance of every node's path, is
    the most of a complete round."""
    length = max(map(len, SEVERAL[name])) + 1
    for seed in range(3):
        p, q = models(kind, 2 if len(SEVERAL[name]) > 4 else 3, length, seed)
        _, tree = next(every(partial(likeliest(SEVERAL[name]), q)))
        accepted = sum(
            math.prod((p[path[:end]][path[end]] for end in range(len(path))), start=Fraction(1))
            for path in tree.paths[1:]
        )
        assert float(accepted) == pytest.approx(
            solve_program(likeliest(SEVERAL[name]), p, q, length - 1), abs=ROUNDING
        )


@pytest.mark.parametrize(
    "kind",
    [
        "dense",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "dense"),
    ],
)
def test_full_linear_program_is_optimal_for_two_drafts(kind: str) -> None:
    """Where it decides about every token, no rule accepts more of two independent drafts (Khisti et
    al., 2024, theorem 1), to the fineness of its chances; about two tokens alone, it accepts less
    of some drafts and never more."""
    less = []
    for seed in range(4):
        p, q = models(kind, 5, 2, seed)
        draft = drawn(widths(2), "sampled")
        full, cut = (
            expected_value(
                accepted_lengths(TruncatedLinearProgram(truncated=n), draft, p, q, False)
            )
            for n in (5, 2)
        )
        best = solve_program(draft, p, q, 1)
        assert float(full) == pytest.approx(best, abs=1e-5)
        assert float(cut) <= best + ROUNDING
        less.append(best - float(cut))
    assert kind != "dense" or max(less) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 3])
def test_transport_is_optimal_for_a_node(count: int, kind: str) -> None:
    """It accepts what the closed form gives for the most likely tokens and one drawn; of two drafts
    so does SpecHub, whose pairs are these."""
    for seed in range(4):
        p, q = models(kind, 4, 2, seed)
        for rule in [Transport(), *([SpecHub()] if count == 2 else [])]:
            result = expected_value(
                accepted_lengths(rule, top_and_sampled(widths(count)), p, q, False)
            )
            _, tree = next(every(partial(top_and_sampled(widths(count)), q)))
            best = optimal_acceptance(siblings_of(tree, 0, p, q, False), "top_and_sampled")
            assert float(result) == pytest.approx(best, abs=1e-12)


def test_spechub_pairs_equal_top_and_sampled_children() -> None:
    """Q(x, hub) = q(x) and Q(hub, x) = q(hub) q(x) / (1 - q(hub)) draw the same pairs as
    top_and_sampled, as often.
    """
    for seed in range(4):
        _, q = models("dense", 4, 1, seed)
        weights = list(q[()])
        hub = max(range(4), key=lambda token: (weights[token], -token))
        pairs = {
            frozenset({x, hub}): w + weights[hub] * w / (1 - weights[hub])
            for x, w in enumerate(weights)
            if x != hub
        }
        result: dict[frozenset[int], Fraction] = {}
        for chance, tree in every(partial(top_and_sampled(widths(2)), q)):
            result[frozenset(tree.tokens[1:])] = chance
        assert result == pairs
