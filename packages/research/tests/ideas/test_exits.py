"""Early exits: unverified ones emit what plain forwards cut off at the exits say, verified ones
the greedy output.
"""

from typing import Any

import numpy as np
import pytest
import torch

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.errors import UserError
from spectrain.models.forward_plan import ForwardPlan, LayerSpan
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from spectrain_research.exits.drafter import Exits
from spectrain_research.exits.rule import Unverified
from spectrain_research.exits.threshold import FEWEST, ThresholdEstimator
from tests.targets import make_random_target

PROMPTS = [[5, 3, 9, 1, 14, 2], [7, 7, 2]]
LIMIT = 14
DEPTH = 3


@pytest.fixture(scope="module")
def target() -> Target:
    """A random target of four layers and 16 tokens."""
    return make_random_target(16, num_layers=4, sharpness=4.0)


def decode_plainly(
    target: Target, prompt: list[int], drafter: Exits
) -> tuple[list[int], list[int]]:
    """The tokens, one forward over all of the text for each exit, and the exit of each of them."""
    answer: list[int] = []
    taken: list[int] = []
    in_a_row = 0
    while len(answer) < LIMIT:
        # The prompt's last token has no early exit; nor has a token after so many of exits.
        exits = (
            (*drafter.exits, target.num_layers)
            if answer and in_a_row < DEPTH
            else (target.num_layers,)
        )
        for layer in exits:
            last = None if layer == target.num_layers else layer
            plan = ForwardPlan(logits=True, span=LayerSpan(last=last))
            logits = target.run(torch.tensor([prompt + answer]), plan).logits
            assert logits is not None
            if layer == target.num_layers or bool(drafter.is_sure(logits[:, -1].log_softmax(-1))):
                break
        in_a_row = in_a_row + 1 if layer < target.num_layers else 0
        answer.append(int(logits[0, -1].argmax()))
        taken.append(layer)
    return answer, taken


CASES: list[dict[str, Any]] = [
    {"exits": (2,), "threshold": 0.6},
    {"exits": (1, 3), "threshold": 0.7},
    {"exits": (1, 2, 3), "measure": "entropy", "threshold": 0.8},
    {"exits": (1, 3), "measure": "margin", "threshold": 0.5},
]


@pytest.mark.parametrize("settings", CASES, ids=["free", "two-exits", "branchynet", "margin"])
@torch.no_grad()
def test_unverified_exits_are_those_of_plain_forwards(
    target: Target, settings: dict[str, Any]
) -> None:
    """The tokens of two texts at once are equal; they leave at every exit and at the end."""
    drafter = Exits(target, **settings)
    generations = decode(
        target, PROMPTS, Unverified(), LIMIT, drafter, Chain(DEPTH), ignore_eos=True
    )
    taken: set[int] = set()
    for prompt, generation in zip(PROMPTS, generations):
        answer, layers = decode_plainly(target, prompt, drafter)
        assert generation.output == answer
        taken |= {*layers}
    assert taken == {*drafter.exits, target.num_layers}


@pytest.mark.parametrize("settings", CASES[1:], ids=["two-exits", "branchynet", "margin"])
@torch.no_grad()
def test_verified_exits_give_the_greedy_output(target: Target, settings: dict[str, Any]) -> None:
    generations = decode(
        target, PROMPTS, Greedy(), LIMIT, Exits(target, **settings), Chain(DEPTH), ignore_eos=True
    )
    assert [generation.output for generation in generations] == [
        generation.output
        for generation in decode(target, PROMPTS, Greedy(), LIMIT, ignore_eos=True)
    ]
    assert any(size > 1 for generation in generations for size in generation.round_lengths)


@torch.no_grad()
def test_trees_are_drafted_by_the_first_exit(target: Target) -> None:
    generations = decode(
        target, PROMPTS, Greedy(), 6, Exits(target, (2, 3)), Eagle2(2, 6, 2), ignore_eos=True
    )
    assert [generation.output for generation in generations] == [
        generation.output for generation in decode(target, PROMPTS, Greedy(), 6, ignore_eos=True)
    ]


def observe_plainly(
    target: Target, prompt: list[int], output: list[int], exits: tuple[int, ...]
) -> ThresholdEstimator:
    """The estimator after all of an answer's tokens but the first: two plain forwards over the
    text for each exit.
    """
    estimator = ThresholdEstimator()
    logits = [
        target.run(
            torch.tensor([prompt + output]), ForwardPlan(logits=True, span=LayerSpan(last=last))
        ).logits
        for last in (*exits, None)
    ]
    # The prompt's forward gives the first token, and the last token is not followed by another.
    *early, late = (part[0, len(prompt) : -1] for part in logits if part is not None)
    for at_exit in early:
        estimator.observe(at_exit.softmax(-1).amax(-1), at_exit.argmax(-1) == late.argmax(-1))
    return estimator


@pytest.mark.parametrize("exits", [(3,), (1, 3)], ids=["one-exit", "two-exits"])
@torch.no_grad()
def test_the_threshold_converges_from_every_start(target: Target, exits: tuple[int, ...]) -> None:
    """From each start, drafts observe what plain forwards over the texts say about all tokens, and
    nothing else.

    Verified exits write the same text whatever the threshold, so all starts end at the same value.
    """
    (greedy,) = decode(target, PROMPTS[:1], Greedy(), 24 + DEPTH, ignore_eos=True)
    ends = set()
    for start in (0.3, 0.6, 0.9):
        drafter = Exits(target, exits, threshold=start, estimate=True, level=0.5)
        (generation,) = decode(
            target, PROMPTS[:1], Greedy(), 24, drafter, Chain(DEPTH), ignore_eos=True
        )
        # The prompt's forward gives the first token; the last round may go on behind the limit.
        output = greedy.output[: 1 + sum(generation.round_lengths)]
        plain = observe_plainly(target, PROMPTS[0], output, exits)
        assert (
            drafter.estimator.num_observed == plain.num_observed == (len(output) - 1) * len(exits)
        )
        for name in ("right", "wrong"):
            assert vars(getattr(drafter.estimator, name)) == pytest.approx(
                vars(getattr(plain, name)), rel=1e-4
            )
        ends.add(round(drafter.threshold, 2))
    assert max(ends) - min(ends) <= 0.03 and not ends & {0.3, 0.6, 0.9}


@torch.no_grad()
def test_the_threshold_of_unverified_exits_converges(target: Target) -> None:
    """Unverified exits write other texts from other starts, and their thresholds end close to
    each other all the same.
    """
    ends = []
    for start in (0.3, 0.6, 0.9):
        drafter = Exits(target, (3,), threshold=start, estimate=True, level=0.5)
        prompts = [[number % 16, number // 16, 3] for number in range(64)]
        decode(target, prompts, Unverified(), 12, drafter, Chain(DEPTH), ignore_eos=True)
        ends.append(drafter.threshold)
    assert max(ends) - min(ends) < 0.05 and min(ends) > 0.8


def test_a_margin_is_between_the_two_largest_probabilities(target: Target) -> None:
    log_q = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.1, 0.8]]).log()
    drafter = Exits(target, measure="margin", threshold=0.2 - 1e-6, estimate=True)
    assert drafter.measure_confidence(log_q).tolist() == pytest.approx([0.2, 0.7])
    assert drafter.is_sure(log_q).tolist() == [True, True]
    drafter.threshold = 0.2 + 1e-6
    assert drafter.is_sure(log_q).tolist() == [False, True]


def test_threshold_of_chosen_distributions() -> None:
    """Moments are recovered; the threshold is where the true mixture's posterior passes the
    level; few tokens give none.
    """
    draws = np.random.default_rng(0)
    right = draws.beta(8, 2, 4000)
    wrong = draws.beta(2, 4, 2000)
    values = np.concatenate([right, wrong])
    labels = np.arange(6000) < 4000
    estimator = ThresholdEstimator()
    estimator.observe(torch.tensor(values), torch.tensor(labels))
    assert estimator.right.fit_beta() == pytest.approx((8, 2), rel=0.1)
    assert estimator.wrong.fit_beta() == pytest.approx((2, 4), rel=0.1)
    threshold = estimator.threshold(0.9)
    assert threshold is not None
    assert labels[np.abs(values - threshold) < 0.03].mean() == pytest.approx(0.9, abs=0.05)
    assert (estimator.threshold(0.99) or 0) > threshold


def test_an_exit_that_is_always_right_lowers_the_threshold() -> None:
    """No token has to be wrong before the threshold moves, and too few tokens say nothing."""
    estimator = ThresholdEstimator()
    estimator.observe(torch.full((FEWEST - 1,), 0.6), torch.ones(FEWEST - 1, dtype=torch.bool))
    assert estimator.threshold(0.9) is None
    estimator.observe(torch.linspace(0.4, 0.9, 200), torch.ones(200, dtype=torch.bool))
    threshold = estimator.threshold(0.9)
    assert threshold is not None and threshold < 0.4


@torch.no_grad()
def test_an_estimate_needs_a_chain(target: Target) -> None:
    with pytest.raises(UserError, match="^drafter.estimate=true: .* use tree=chain$"):
        decode(
            target,
            PROMPTS,
            Greedy(),
            6,
            Exits(target, (2,), estimate=True),
            Eagle2(2, 6, 2),
            ignore_eos=True,
        )


def test_invalid_settings_are_refused(target: Target) -> None:
    for settings in ({"exits": (4,)}, {"exits": (2, 1)}, {"estimate": True, "measure": "entropy"}):
        with pytest.raises(UserError, match="^drafter.(exits|estimate)="):
            Exits(target, **settings)  # type: ignore[arg-type]
