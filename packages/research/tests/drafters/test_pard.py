"""The tests of tests/drafters/test_pard.py that are about ideas."""

import pytest

from packages.research.tests.decoding.test_guard import Switch
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.session import Session
from spectrain.models.target import Target
from spectrain.trees import Chain
from tests.drafters.test_pard import (
    LIMIT,
    PROMPTS,
    RecordingBuilder,
    check_log_probs,
    greedy_answers,  # noqa: F401  (a fixture)
    make_drafter,
)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("pattern", [".d", "d..", "....ddd"])
def test_rounds_without_a_draft(
    shallow: Target, greedy_answers: list[list[int]], pattern: str, count: int
) -> None:
    """Whichever rounds draft, the output is greedy, and the drafter has read what the rounds
    between them emitted.
    """
    drafter = make_drafter(shallow, num_layers=2)
    switch = Switch(pattern)
    recorder = RecordingBuilder(Chain(3))
    session = Session(shallow, Greedy(), drafter, recorder, changes=(switch,))
    generations = session.decode(PROMPTS[:count], LIMIT, ignore_eos=True)
    assert [row.output for row in generations] == greedy_answers[:count]
    assert all(
        (depth > 0) == drafted
        for row in generations
        for depth, (drafted, _) in zip(row.depths, switch.recorded)
    )
    check_log_probs(drafter, recorder.records)
