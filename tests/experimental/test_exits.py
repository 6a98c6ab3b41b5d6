"""Early exits: unverified ones emit what plain forwards cut off at the exits say, verified ones the greedy output."""

from typing import Any

import numpy as np
import pytest
import torch

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.errors import UserError
from spectrain.experimental.exits.drafter import Exits
from spectrain.experimental.exits.rule import Unverified
from spectrain.experimental.exits.threshold import estimate_threshold, fit_beta
from spectrain.models.forward_plan import ForwardPlan, LayerSpan
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from tests.targets import make_random_target

PROMPTS = [[5, 3, 9, 1, 14, 2], [7, 7, 2]]
LIMIT, DEPTH = 14, 3


@pytest.fixture(scope="module")
def target() -> Target:
    """A random target of four layers and 16 tokens."""
    return make_random_target(16, num_layers=4, sharpness=4.0)


def decode_plainly(target: Target, prompt: list[int], drafter: Exits) -> tuple[list[int], list[int]]:
    """The tokens, one forward over all of the text for each exit, and the exit of each of them."""
    answer: list[int] = []
    taken: list[int] = []
    in_a_row = 0
    while len(answer) < LIMIT:
        # The prompt's last token has no early exit; nor has a token after so many of exits.
        exits = (*drafter.exits, target.num_layers) if answer and in_a_row < DEPTH else (target.num_layers,)
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
]


@pytest.mark.parametrize("settings", CASES, ids=["free", "two-exits", "branchynet"])
@torch.no_grad()
def test_unverified_exits_are_those_of_plain_forwards(target: Target, settings: dict[str, Any]) -> None:
    """The tokens of two texts at once are equal; they leave at every exit and at the end."""
    drafter = Exits(target, **settings)
    generations = decode(target, PROMPTS, Unverified(), LIMIT, drafter, Chain(DEPTH), ignore_eos=True)
    taken: set[int] = set()
    for prompt, generation in zip(PROMPTS, generations):
        answer, layers = decode_plainly(target, prompt, drafter)
        assert generation.output == answer
        taken |= {*layers}
    assert taken == {*drafter.exits, target.num_layers}


@pytest.mark.parametrize("settings", CASES[1:], ids=["two-exits", "branchynet"])
@torch.no_grad()
def test_verified_exits_give_the_greedy_output(target: Target, settings: dict[str, Any]) -> None:
    generations = decode(target, PROMPTS, Greedy(), LIMIT, Exits(target, **settings), Chain(DEPTH), ignore_eos=True)
    assert [generation.output for generation in generations] == [
        generation.output for generation in decode(target, PROMPTS, Greedy(), LIMIT, ignore_eos=True)
    ]
    assert any(size > 1 for generation in generations for size in generation.round_lengths)


@torch.no_grad()
def test_trees_are_drafted_by_the_first_exit(target: Target) -> None:
    generations = decode(target, PROMPTS, Greedy(), 6, Exits(target, (2, 3)), Eagle2(2, 6, 2), ignore_eos=True)
    assert [generation.output for generation in generations] == [
        generation.output for generation in decode(target, PROMPTS, Greedy(), 6, ignore_eos=True)
    ]


@torch.no_grad()
def test_the_threshold_follows_the_target(target: Target) -> None:
    """The pairs that are learned from are the exits' probabilities and whether the target's token is the same."""
    drafter = Exits(target, (2,), threshold=0.5, estimate=True)
    (generation,) = decode(target, PROMPTS[:1], Unverified(), 40, drafter, Chain(DEPTH), ignore_eos=True)
    text, pairs, at = PROMPTS[0] + generation.output, [], len(PROMPTS[0]) + 1
    for size in generation.round_lengths:
        for end in range(at, at + size - 1):
            early, late = (
                target.run(torch.tensor([text[:end]]), ForwardPlan(logits=True, span=LayerSpan(last=last))).logits
                for last in (2, None)
            )
            assert early is not None and late is not None
            pairs.append((float(early[0, -1].softmax(-1).max()), int(early[0, -1].argmax()) == int(late[0, -1].argmax())))
        at += size
    assert np.allclose(drafter.confidences, [generation for generation, _ in pairs], atol=1e-4)
    assert drafter.agreed == [generation for _, generation in pairs] and {*drafter.agreed} == {True, False}


def test_threshold_of_chosen_distributions() -> None:
    """Moments are recovered; the threshold is where the true mixture's posterior passes the level; few pairs keep it."""
    draws = np.random.default_rng(0)
    right, wrong = draws.beta(8, 2, 4000), draws.beta(2, 4, 2000)
    assert fit_beta(right) == pytest.approx((8, 2), rel=0.1)
    values, labels = [*right, *wrong], [True] * 4000 + [False] * 2000
    threshold = estimate_threshold(values, labels, 0.9, 0.5)
    inside = [label for value, label in zip(values, labels) if abs(value - threshold) < 0.03]
    assert np.mean(inside) == pytest.approx(0.9, abs=0.05)
    assert estimate_threshold(values, labels, 0.99, 0.5) > threshold
    assert estimate_threshold([0.9] * 20, [True] * 20, 0.9, 0.5) == 0.5


def test_invalid_settings_are_refused(target: Target) -> None:
    for settings in ({"exits": (4,)}, {"exits": (2, 1)}, {"estimate": True, "measure": "entropy"}):
        with pytest.raises(UserError, match="^drafter.(exits|estimate)="):
            Exits(target, **settings)  # type: ignore[arg-type]
