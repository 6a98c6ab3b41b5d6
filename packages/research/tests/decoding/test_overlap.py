"""Drafting while the target verifies: the same output, the same rounds, and a worker that goes
where the text goes.
"""

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spectrain.decoding.acceptance import Greedy, Match
from spectrain.decoding.acceptance.rejection import SpeculativeSampling
from spectrain.decoding.loop import decode
from spectrain.decoding.session import Session, prepare_for_decoding
from spectrain.drafters.base import Drafter
from spectrain.drafters.causal import Causal
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.ngram import Ngram
from spectrain.errors import RunError, UserError
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from spectrain_research.cross_vocabulary.drafter import Universal
from spectrain_research.overlap.runner import Overlap, ProcessWorker, check_overlap
from spectrain_research.shared.follower import DraftRequest, Follower, select_outcomes
from tests.decoding.rounds import begun, proposed
from tests.drafters.bilingual import TEXT, byte_level, random_model

PROMPTS = [[5, 900, 71, 4, 333], [17, 1200, 8], [40, 41, 42, 40, 41, 42, 40, 41]]
LIMIT = 18
DRAFTERS: dict[str, Any] = {
    "causal": lambda target, stranger: Causal(target, num_layers=2),
    "ngram": lambda target, stranger: Ngram(target),
    "shared tokens": lambda target, stranger: Universal(target, stranger),
    "texts": lambda target, stranger: Universal(target, stranger, "text"),
}


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a small model with another tokenizer."""
    torch.manual_seed(2)
    return random_model(byte_level(320, TEXT), tmp_path_factory.mktemp("stranger"))


def make_drafter(name: str, target: Target, stranger: str = "") -> Drafter:
    torch.manual_seed(0)
    return prepare_for_decoding(DRAFTERS[name](target, stranger), target)


@pytest.mark.parametrize("name", DRAFTERS)
def test_follower_drafts_equal_the_drafters(shallow: Target, stranger: str, name: str) -> None:
    """After any texts, longer, shorter and others than the one before, it proposes what a drafter
    that reads the text anew proposes in a round."""
    follower = Follower(make_drafter(name, shallow, stranger), shallow)
    anew = make_drafter(name, shallow, stranger)
    follower.start_text(64, 3)
    draw = torch.Generator().manual_seed(1)
    text = torch.randint(3, 2000, (12,), generator=draw).tolist()
    texts = [
        text[:6],
        text[:9],
        text[:7],
        [*text[:4], 8, 9, 9],
        text[:4],
        text,
        text,
        [*text[:11], 7],
    ]
    with torch.inference_mode():
        for item in texts:
            result = follower.draft(item, 3, lambda: False)
            context = begun(shallow, [item[:-1]], None, Chain(3))
            context.tokens[0, len(item) - 1] = item[-1]
            tree = proposed(anew, context, Chain(3))
            assert result == tree.tokens[0, 1:].tolist()


def test_superseded_draft_is_abandoned(shallow: Target) -> None:
    """Between two levels the follower checks for a newer request; what it drafts next is right
    all the same.
    """
    follower, alone = (Follower(make_drafter("causal", shallow), shallow) for _ in range(2))
    with torch.inference_mode():
        for item in (follower, alone):
            item.start_text(64, 4)
        assert follower.draft(PROMPTS[0], 4, lambda: True) == []
        other = [*PROMPTS[0][:3], 8]
        assert follower.draft(other, 4, lambda: False) == alone.draft(other, 4, lambda: False)


def test_outcomes_are_selected_by_probability() -> None:
    """A chain of two over five tokens has all outcomes, in the order of their chances by the
    drafter, which sum to one.
    """
    log_q = torch.randn(
        3, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    ).log_softmax(-1)
    q = log_q.exp()
    chain = log_q.argmax(-1).tolist()
    chances = {
        (accepted, x): float(q[accepted, x])
        for accepted in range(3)
        for x in range(5)
        if accepted == 2 or x != chain[accepted]
    }
    for accepted, x in chances:
        for index in range(accepted):
            chances[accepted, x] *= float(q[index, chain[index]])
    assert sum(chances.values()) == pytest.approx(1)
    result = [tuple(outcome) for outcome in select_outcomes(log_q, 100).tolist()]
    assert result == sorted(chances, key=lambda outcome: -chances[outcome])
    assert [tuple(outcome) for outcome in select_outcomes(log_q, 4).tolist()] == result[:4]


def test_draft_after_every_outcome_equals_a_new_draft(shallow: Target) -> None:
    """Drafted at once, or as far as there was time and then finished, after a draft in progress or
    a finished one, it is what a follower of that text drafts."""
    follower, alone = (Follower(make_drafter("causal", shallow), shallow) for _ in range(2))
    text = PROMPTS[0]
    first_drafts = list[list[int]]()
    with torch.inference_mode():
        for item in (follower, alone):
            item.start_text(64, 3, 5)
        drafted: list[int] | None = None
        for levels in (3, 1, 0):
            foreseen = follower.predict_outcomes(
                DraftRequest(1, text, 3, num_outcomes=5), drafted, first_drafts.append
            )
            left = iter([False] * levels)
            foreseen.extend_drafts(lambda left=left: next(left, True))  # type: ignore[misc]
            texts = [item.text for item in foreseen.outcomes]
            assert (
                len({*map(tuple, texts)}) == 5
                and foreseen.finish_draft([*text, 7, 7, 7, 7, 7]) is None
            )
            text = texts[levels]
            drafted = foreseen.finish_draft(texts[levels])
            if levels == 3:
                assert [foreseen.finish_draft(item) for item in texts] == [
                    alone.draft(item, 3, lambda: False) for item in texts
                ]
            foreseen.end_draft()
            assert drafted == alone.draft(text, 3, lambda: False)
        assert first_drafts == [alone.draft(PROMPTS[0], 3, lambda: False)]


def test_the_host_does_not_wait_for_every_outcome(shallow: Target) -> None:
    """Foreseeing more outcomes reads no more values from the device."""

    class ReadCounter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += func.name() in ("aten::_local_scalar_dense", "aten::lift_fresh")
            return func(*args, **(kwargs or {}))

    counts = []
    for outcomes in (2, 9):
        follower = Follower(make_drafter("causal", shallow), shallow)
        with torch.inference_mode():
            follower.start_text(64, 3, outcomes)
            with ReadCounter() as counter:
                foreseen = follower.predict_outcomes(
                    DraftRequest(1, PROMPTS[0], 3, num_outcomes=outcomes),
                    [5, 6, 7],
                    lambda tokens: None,
                )
            assert len(foreseen.outcomes) == outcomes
        counts.append(counter.count)
    assert counts[0] == counts[1] > 0


def test_ready_drafts_equal_predicted_outcomes(shallow: Target) -> None:
    """Of the rounds of a decoding those whose text is among the likely outcomes of the verification
    before, the prompt's too; the more outcomes, the more of them."""
    drafter = make_drafter("causal", shallow)
    counts = []
    for outcomes in (1, 4, 400):
        overlap = Overlap(num_outcomes=outcomes)
        (result,) = Session(shallow, Greedy(), drafter, Chain(3), changes=(overlap,)).decode(
            [PROMPTS[0]], LIMIT, ignore_eos=True
        )
        follower = Follower(make_drafter("causal", shallow), shallow)
        expected = 0
        follower.start_text(64, 3, outcomes)
        text = PROMPTS[0]
        chain = list[int]()
        end = 1
        for emitted in result.round_lengths:
            with torch.inference_mode():
                foreseen = follower.predict_outcomes(
                    DraftRequest(1, text, 3, num_outcomes=outcomes), chain, lambda tokens: None
                )
                foreseen.end_draft()
                text = PROMPTS[0] + result.output[:end]
                expected += text in [item.text for item in foreseen.outcomes]
                chain = follower.draft(text, 3, lambda: False)
            end += emitted
        assert (overlap.num_ready, overlap.num_missed) == (
            expected,
            len(result.round_lengths) - expected,
        )
        counts.append(overlap.num_ready)
    assert counts[0] <= counts[1] < counts[2]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "way", [{}, {"pre_verify": True}, {"num_outcomes": 6}], ids=["post", "pearl", "outcomes"]
)
@pytest.mark.parametrize("rule", [Greedy(), Match(temperature=1.5)], ids=lambda rule: rule.name)
@pytest.mark.parametrize("name", DRAFTERS)
def test_overlapped_output_equals_the_loop(
    shallow: Target, stranger: str, name: str, rule: Any, way: dict[str, Any], streams: bool
) -> None:
    """In a process of its own, or on a stream, the drafter gives the same tokens, prompt after
    prompt; without steps of the target in between, in the same rounds."""
    drafter = make_drafter(name, shallow, stranger)
    builder = Chain(3)
    overlap = Overlap(**way, uses_streams=streams)
    if overlap.num_outcomes and not drafter.capabilities.scores_path_at_once:
        pytest.skip("its chances do not say what follows")
    session = Session(shallow, rule, drafter, builder, changes=(overlap,))
    for number, prompt in enumerate(PROMPTS[1:]):
        (plain,) = decode(
            shallow, [prompt], rule, LIMIT, drafter, builder, [number], ignore_eos=True
        )
        (result,) = session.decode([prompt], LIMIT, [number], ignore_eos=True)
        assert result.output == plain.output
        if not overlap.pre_verify:
            assert (result.round_lengths, result.depths) == (plain.round_lengths, plain.depths)
    assert overlap.num_missed > 0


def test_stream_worker_drafts_equal_the_process(shallow: Target) -> None:
    """As many drafts are ready, whatever is done ahead."""
    drafter = make_drafter("causal", shallow)
    for way in ({}, {"pre_verify": True}, {"num_outcomes": 5}):
        both = [Overlap(**way, uses_streams=streams) for streams in (False, True)]
        for overlap in both:
            Session(shallow, Greedy(), drafter, Chain(3), changes=(overlap,)).decode(
                [PROMPTS[0]], LIMIT, ignore_eos=True
            )
        assert (both[0].num_ready, both[0].num_missed) == (both[1].num_ready, both[1].num_missed)


def test_the_target_is_launched_before_the_drafter_drafts_ahead(
    shallow: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stream of its own, with a drafter that is always right: every forward of it but the
    first ones comes between a launch of the target's and the reading of what that gave, as many as
    a draft and a token more take."""
    drafter = make_drafter("causal", shallow)
    rule = Greedy()
    calls = list[str]()
    drafter.model = copy.deepcopy(shallow)

    def record_calls(name: str, function: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls.append(name)
            return function(*arguments, **keywords)

        return call

    monkeypatch.setattr(shallow, "verify", record_calls("verify", shallow.verify))
    monkeypatch.setattr(drafter.model, "run", record_calls("draft", drafter.model.run))  # type: ignore[union-attr]
    monkeypatch.setattr(rule, "accept", record_calls("accept", rule.accept))
    overlap = Overlap(uses_streams=True)
    Session(shallow, rule, drafter, Chain(3), changes=(overlap,)).decode(
        [PROMPTS[0]], LIMIT, ignore_eos=True
    )
    rounds = " ".join(calls).split("verify")
    assert overlap.num_missed == 0 and len(rounds) > 4
    assert [item.split() for item in rounds[1:]] == [["draft"] * 4 + ["accept"]] * (len(rounds) - 1)


def test_correct_drafts_are_ready(shallow: Target) -> None:
    """The target itself as drafter: after the first round, or the first step, every draft was
    made while the target worked.
    """
    drafter = prepare_for_decoding(Causal(shallow, num_layers=2), shallow)
    drafter.model = copy.deepcopy(shallow)
    for overlap in (Overlap(), Overlap(pre_verify=True)):
        session = Session(shallow, Greedy(), drafter, Chain(3), changes=(overlap,))
        (result,) = session.decode([PROMPTS[0]], LIMIT, ignore_eos=True)
        assert (
            overlap.num_missed == 0
            and overlap.num_ready == len(result.round_lengths) == (LIMIT + 2) // 4
        )


def test_ended_worker_raises_an_error(shallow: Target) -> None:
    """The error is raised, and nothing waits for the worker."""
    worker = ProcessWorker(make_drafter("ngram", shallow), shallow)
    worker.connection.close()
    with pytest.raises(RunError, match=r"eval\.overlap: the process that drafts has ended"):
        worker.request_draft([1, 2], 3, 64)


def test_drafters_that_cannot_overlap_are_refused(shallow: Target) -> None:
    """Drafters that read the target's features, trees, rules whose tokens depend on drafts, and
    texts side by side.
    """
    causal = make_drafter("causal", shallow)
    for drafter, builder, rule, message in [
        (Eagle3(shallow, vocab_size=64), Chain(3), Greedy(), "cannot draft ahead"),
        (causal, Eagle2(3, 6, 2), Greedy(), "tree=chain"),
        (causal, Chain(3, stop=0.5), Greedy(), "tree=chain"),
        (causal, Chain(3, "sampled"), SpeculativeSampling(), "tree=chain"),
        (causal, Chain(3), SpeculativeSampling(), "acceptance=chain"),
    ]:
        with pytest.raises(UserError, match=message):
            check_overlap(drafter, builder, rule)
    with pytest.raises(UserError, match=r"eval\.overlap=outcomes: .*drafter=causal"):
        check_overlap(make_drafter("ngram", shallow), Chain(3), Greedy(), num_outcomes=4)
    with pytest.raises(UserError, match=r"eval\.batch_size=1"):
        Session(shallow, Greedy(), causal, Chain(3), changes=(Overlap(),)).decode(
            PROMPTS[:2], LIMIT
        )
