"""Drafting while the target verifies: the same output, the same rounds, and a worker that goes where the text goes."""

import copy
from typing import Any

import pytest
import torch

from spectrain.decoding.acceptance import Greedy, Match, SpeculativeSampling
from spectrain.decoding.loop import decode
from spectrain.decoding.overlap import Follower, Overlap, Worker, check_overlap
from spectrain.decoding.session import Session, ready
from spectrain.drafters.base import Drafter
from spectrain.drafters.causal import Causal
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.ngram import Ngram
from spectrain.drafters.universal import Universal
from spectrain.errors import RunError, UserError
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
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


def made(name: str, target: Target, stranger: str = "") -> Drafter:
    torch.manual_seed(0)
    return ready(DRAFTERS[name](target, stranger), target)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_follower_drafts_what_the_drafter_drafts(shallow: Target, stranger: str, name: str) -> None:
    """After any texts, longer, shorter and others than the one before, it expects what a drafter that reads the text anew
    proposes in a round."""
    follower, anew = Follower(made(name, shallow, stranger), shallow), made(name, shallow, stranger)
    follower.begin(64, 3)
    draw = torch.Generator().manual_seed(1)
    text = torch.randint(3, 2000, (12,), generator=draw).tolist()
    texts = [text[:6], text[:9], text[:7], [*text[:4], 8, 9, 9], text[:4], text, text, [*text[:11], 7]]
    with torch.inference_mode():
        for one in texts:
            found = follower.draft(one, 3, lambda: False)
            context = begun(shallow, [one[:-1]], None, Chain(3))
            context.tokens[0, len(one) - 1] = one[-1]
            tree = proposed(anew, context, Chain(3))
            assert found == tree.tokens[0, 1:].tolist()


def test_a_draft_that_nobody_wants_is_given_up(shallow: Target) -> None:
    """Between two levels it looks whether something else is wanted; what it drafts next is right all the same."""
    follower, alone = (Follower(made("causal", shallow), shallow) for _ in range(2))
    with torch.inference_mode():
        for one in (follower, alone):
            one.begin(64, 4)
        assert follower.draft(PROMPTS[0], 4, lambda: True) == []
        other = [*PROMPTS[0][:3], 8]
        assert follower.draft(other, 4, lambda: False) == alone.draft(other, 4, lambda: False)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("pre_verify", [False, True])
@pytest.mark.parametrize("rule", [Greedy(), Match(temperature=1.5)], ids=lambda rule: rule.name)
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_output_is_the_loops(shallow: Target, stranger: str, name: str, rule: Any, pre_verify: bool) -> None:
    """In a process of its own the drafter gives the same tokens, prompt after prompt; without steps of the target in between,
    in the same rounds."""
    drafter, builder, overlap = made(name, shallow, stranger), Chain(3), Overlap(pre_verify)
    session = Session(shallow, rule, drafter, builder, overlap=overlap)
    for number, prompt in enumerate(PROMPTS[1:]):
        (plain,) = decode(shallow, [prompt], rule, LIMIT, drafter, builder, [number], ignore_eos=True)
        (found,) = session.decode([prompt], LIMIT, [number], ignore_eos=True)
        assert found.output == plain.output
        if not pre_verify:
            assert (found.accepted, found.depths) == (plain.accepted, plain.depths)
    assert overlap.missed > 0


def test_drafts_that_are_right_are_ready(shallow: Target) -> None:
    """The target itself as drafter: after the first round, or the first step, every draft was made while the target worked."""
    drafter = ready(Causal(shallow, num_layers=2), shallow)
    drafter.model = copy.deepcopy(shallow)
    for pre_verify in (False, True):
        overlap = Overlap(pre_verify)
        session = Session(shallow, Greedy(), drafter, Chain(3), overlap=overlap)
        (found,) = session.decode([PROMPTS[0]], LIMIT, ignore_eos=True)
        assert overlap.missed == 0 and overlap.ready == len(found.accepted) == (LIMIT + 2) // 4


def test_a_worker_that_has_ended_is_said(shallow: Target) -> None:
    """And nothing waits for it."""
    worker = Worker(made("ngram", shallow), shallow)
    worker.wire.close()
    with pytest.raises(RunError, match=r"eval\.overlap: the process that drafts has ended"):
        worker.ask([1, 2], 3, 64)


def test_what_cannot_overlap_is_refused(shallow: Target) -> None:
    """Drafters that read the target's features, trees, rules whose tokens depend on drafts, and texts side by side."""
    causal = made("causal", shallow)
    for drafter, builder, rule, said in [
        (Eagle3(shallow, vocab_size=64), Chain(3), Greedy(), "cannot draft ahead"),
        (causal, Eagle2(3, 6, 2), Greedy(), "tree=chain"),
        (causal, Chain(3, stop=0.5), Greedy(), "tree=chain"),
        (causal, Chain(3, "sampled"), SpeculativeSampling(), "tree=chain"),
        (causal, Chain(3), SpeculativeSampling(), "acceptance=chain"),
    ]:
        with pytest.raises(UserError, match=said):
            check_overlap(drafter, builder, rule)
    with pytest.raises(UserError, match=r"eval\.batch_size=1"):
        Session(shallow, Greedy(), causal, Chain(3), overlap=Overlap()).decode(PROMPTS[:2], LIMIT)
