"""What counts as agreement of another engine's rounds with ours."""

from typing import Any

from lab.benchmarks.mlx_rounds import Agreement, begin_rounds
from spectrain.decoding.generation import Generation

OURS = Generation([1], [5, 6, 7, 8, 9, 10], round_lengths=[2, 1, 2])


def count(**changes: Any) -> Agreement:
    agreement = Agreement()
    answer = {"tokens": OURS.output, "start": 1, "rounds": [2, 1, 2]}
    agreement.add(OURS, answer | changes)
    return agreement


def test_rounds_begin_behind_those_before_them() -> None:
    assert begin_rounds(1, [2, 1, 2]) == {1: 2, 3: 1, 4: 2}


def test_equal_texts_and_rounds_agree() -> None:
    assert count() == Agreement(1, 1, 3, 3, 3, [])


def test_a_round_of_another_length_and_another_text_are_named() -> None:
    assert count(rounds=[2, 3]) == Agreement(1, 1, 3, 2, 1, [0])
    assert count(tokens=[5, 6, 7, 8, 9, 11]) == Agreement(1, 0, 3, 3, 3, [0])


def test_rounds_that_begin_elsewhere_are_not_compared() -> None:
    """Another engine drafts the first token too, and its rounds meet ours at token 3."""
    assert count(start=0, rounds=[3, 1]) == Agreement(1, 1, 3, 1, 1, [])
