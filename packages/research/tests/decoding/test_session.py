"""The tests of tests/decoding/test_session.py that are about ideas."""

import pytest

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.acceptance.rejection import RecursiveRejection
from spectrain.decoding.loop import decode
from spectrain.decoding.session import Session, require_capture
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, Static
from spectrain_research.layer_skip.drafter import LayerSkipping
from spectrain_research.pruning.pruning import Pruning
from spectrain_research.shared.guard import Guard
from tests.decoding.test_session import PROMPTS


def test_uncapturable_rounds_run_in_the_eager_loop(tiny: Target) -> None:
    """They run there with the reason, and are refused by name where capture is required."""
    eagle3 = Eagle3(tiny, vocab_size=64).eval()
    sessions = {
        "eval.guard decides": Session(
            tiny, Greedy(), eagle3, Chain(2), changes=(Guard(),), engine="captured"
        ),
        "eval.prune_layer decides": Session(
            tiny, Greedy(), eagle3, Chain(2), changes=(Pruning(4, 2),), engine="captured"
        ),
        "drafter=ngram reads values": Session(
            tiny, Greedy(), Ngram(tiny), Chain(2), engine="captured"
        ),
    }
    plain = [generation.output for generation in decode(tiny, PROMPTS, Greedy(), 8)]
    for words, session in sessions.items():
        assert session.eager_reason is not None and words in session.eager_reason
        with pytest.raises(
            UserError, match=f"writer.engine=captured: {words}.*use writer.engine=eager"
        ):
            require_capture(session, "writer.engine")
        assert [generation.output for generation in session.decode(PROMPTS, 8)] == plain


def test_guard_and_pruning_combine(tiny: Target) -> None:
    """Rounds that the guard lets draft are pruned, the others are one node, and the output is
    the target's.
    """
    drafter = LayerSkipping(tiny, skipped=[5])
    guard = Guard(cost=lambda nodes: 1.0)
    session = Session(tiny, Greedy(), drafter, Eagle2(3, 8, 3), changes=(guard, Pruning(6, 2)))
    result = session.decode(PROMPTS, 12, ignore_eos=True)
    assert [item.output for item in result] == [
        item.output for item in decode(tiny, PROMPTS, Greedy(), 12, ignore_eos=True)
    ]
    assert guard.num_undrafted == 2 and guard.num_drafted > 0
    for item in result:
        assert (
            item.node_counts[:2] == [1, 1]
            and item.pruned_counts[:2] == item.depths[:2] == [0, 0]
            and sum(item.pruned_counts) > 0
        )


def test_from_drafter_tunes_calibrates_and_checks(shallow: Target) -> None:
    """Settings are searched and trees measured on the given prompts; a rule that would be wrong
    is refused.
    """
    requested = []

    def prompts() -> list[list[int]]:
        requested.append(1)
        return PROMPTS[:1]

    drafter = LayerSkipping(shallow, search_steps=2, answer_tokens=4)
    builder = Static(depth=2, budget=4)
    session = Session.from_drafter(shallow, drafter, builder, Greedy(), prompts, engine="eager")
    assert (
        drafter.capabilities.search is None
        and len(builder.paths) == 3
        and len(requested) == 2
        and not drafter.training
    )
    assert [generation.output for generation in session.decode(PROMPTS, 6)] == [
        generation.output for generation in decode(shallow, PROMPTS, Greedy(), 6)
    ]
    Session.from_drafter(shallow, Ngram(shallow), Chain(2), RecursiveRejection(), prompts)
    assert len(requested) == 2
    with pytest.raises(UserError, match="acceptance=recursive"):
        Session.from_drafter(
            shallow, Eagle3(shallow, vocab_size=64), Chain(2), RecursiveRejection(), prompts
        )
