"""Cases of the ideas for tests/decoding/test_lossless.py."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

from spectrain.decoding.acceptance.sequential import RandomSource, VerifiedTree
from spectrain_research.on_policy.interleaved import InterleavedSampling
from spectrain_research.transport.linear_program import TruncatedLinearProgram
from spectrain_research.transport.rules import ImportanceSampling, KSeq, Transport
from spectrain_research.traversal.rule import Traversal
from tests.decoding.test_lossless import (
    PAIR,
    TWO_LEVELS,
    Vector,
    Wrong,
    drawn,
    leave_as_is,
    leave_unnormalised,
    likeliest,
    not_divided,
    rate_itself,
    scaled,
    skip_duplicates,
    sort_siblings,
    tamper_draft,
    top_and_sampled,
)


class ForgetsTheChoice(ImportanceSampling):
    """The chosen draft is judged as if it were the only one."""

    def _chosen_distribution(self, p: Vector, q: Vector, powers: Any, count: int) -> Vector:
        return q


class ForgetsTheProgramme(TruncatedLinearProgram):
    """The choice of the linear program is judged as if it were the only one."""

    def _stay_chances(self, p: Vector, q: Vector, count: int) -> tuple[list[Any], Vector]:
        return super()._stay_chances(p, q, count)[0], q


class TopTaken(Transport):
    """The child that is drawn besides the most likely ones is judged as if it had been drawn
    from all of q.
    """

    def select_path(self, row: VerifiedTree, dice: RandomSource) -> tuple[list[int], int]:
        def q(node: int) -> Vector:
            return scaled(row.q(node) + Fraction(1, 4) * (row.q(node) == 0))

        return super().select_path(replace(row, q=q), dice)


CASES: dict[str, Any] = {
    "test_drawn_chains_are_lossless": [Traversal()],
    "test_drawn_trees_are_lossless": [Traversal()],
    "test_trees_grown_best_first_are_lossless": [Traversal()],
    "test_chains_that_stop_before_a_draw_are_lossless": [Traversal()],
    "test_chains_that_a_policy_ends_are_lossless": [Traversal()],
    "test_lengths_learned_from_earlier_rounds_are_lossless": [Traversal()],
    "test_acceptance_chances_equal_enumeration": [Traversal()],
    "test_acceptance_chances_of_lossy_rules_equal_their_verdicts": [InterleavedSampling(top_k=2)],
    "WRONG": [
        Wrong("likeliest-children-traversal", Traversal(), likeliest(TWO_LEVELS), True),
        Wrong(
            "sorted-siblings-traversal-without",
            Traversal(),
            tamper_draft(drawn(PAIR, "without_replacement"), sort_siblings),
            True,
        ),
        Wrong(
            "sorted-siblings-traversal-with",
            Traversal(),
            tamper_draft(drawn(PAIR, "sampled"), sort_siblings),
        ),
        Wrong(
            "residual-not-normalised-traversal",
            Traversal(),
            drawn(PAIR, "sampled"),
            patch=("normalize_weights", leave_unnormalised),
        ),
        Wrong(
            "q-keeps-the-drawn-traversal", Traversal(), drawn(PAIR, "without_replacement"), False
        ),
        Wrong(
            "q-not-normalised-traversal",
            Traversal(),
            drawn(PAIR, "without_replacement"),
            True,
            ("remove_token", leave_as_is),
        ),
        Wrong(
            "duplicates-skipped-traversal",
            Traversal(),
            tamper_draft(drawn(PAIR, "sampled"), skip_duplicates),
        ),
        Wrong(
            "middle-h-is-b-traversal",
            Traversal(),
            drawn(TWO_LEVELS, "sampled"),
            patch=("residual_rate", rate_itself),
        ),
        Wrong(
            "not-divided-kseq", KSeq(), drawn(PAIR, "sampled"), patch=("solve_divisor", not_divided)
        ),
        Wrong("distinct-drafts-kseq", KSeq(), drawn(PAIR, "without_replacement")),
        Wrong("likeliest-children-kseq", KSeq(), likeliest(PAIR)),
        Wrong("choice-forgotten-importance", ForgetsTheChoice(), drawn(PAIR, "sampled")),
        Wrong("choice-forgotten-programme", ForgetsTheProgramme(), drawn(PAIR, "sampled")),
        Wrong(
            "distinct-drafts-importance", ImportanceSampling(), drawn(PAIR, "without_replacement")
        ),
        Wrong(
            "residual-not-normalised-importance",
            ImportanceSampling(),
            drawn(PAIR, "sampled"),
            patch=("normalize_weights", leave_unnormalised),
        ),
        Wrong("drawn-from-all-of-q-transport", TopTaken(), top_and_sampled(PAIR)),
        Wrong(
            "sorted-siblings-transport",
            Transport(),
            tamper_draft(drawn(PAIR, "sampled"), sort_siblings),
        ),
    ],
    "test_rules_that_need_drawn_children_refuse_others": [Traversal()],
    "test_tree_rules_accept_branches": [Traversal()],
    "test_bad_settings_are_refused": [Traversal, ImportanceSampling],
}
