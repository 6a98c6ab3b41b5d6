"""The tests of tests/decoding/test_captured.py that are about ideas."""

from spectrain.decoding.acceptance import Greedy
from spectrain.models.target import Target
from spectrain_research.redrafter.beam import Beam
from spectrain_research.redrafter.drafter import Redrafter
from tests.decoding.test_captured import assert_same_rounds
from tests.drafters.forced import shaken


def test_captured_beams_equal_the_loop(shallow: Target) -> None:
    """How many nodes beams share depends on the scores, and the tree's size does not. (Of a drafter
    that is unsure, rounding decides which beams stay, so this one is not.)"""
    drafter = shaken(Redrafter(shallow, vocab_size=512), shallow, 2.0)
    assert_same_rounds(shallow, Greedy(), drafter, Beam(3, 8, 3))
